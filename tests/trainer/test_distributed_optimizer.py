"""Optimizer states sharded over the replicas: the same numbers, and tied weights with the same bits (PO-01)."""

from functools import partial

import pytest

from tests.models import GPT, texts
from tests.oracle import assert_same, parallel, serial
from tests.trainer.test_layouts import PLAN

BATCHES = [texts(4, seed=i) for i in range(3)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adagrad"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_sharded_states_change_no_number(sizes, optimizer, tied):
    make = partial(GPT, optimizer=optimizer, tied=tied, lr=0.01)
    t, p, d = sizes
    run, _ = parallel(
        make,
        BATCHES,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        data_parallel_size=d,
        micro_batch_size=1,
        tensor_parallel_plan=PLAN if t > 1 else None,
        distributed_optimizer=True,
        trainer={"gradient_clip_val": 0.5},
    )
    one = serial(make, BATCHES, clip=0.5)
    run.gradients, one.gradients = [], []
    assert_same(run, one)
