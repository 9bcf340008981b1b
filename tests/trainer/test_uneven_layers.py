"""Layers that do not divide over the stages: none is lost, and what cannot be is refused (PO-14)."""

from collections import Counter
from functools import partial

import pytest

from tests.models import GPT, texts
from tests.oracle import assert_same, parallel, serial
from tests.spmd import SpmdError


@pytest.mark.parametrize(
    ("num_layers", "p", "v", "allowed"),
    [(7, 2, 1, {3, 4}), (10, 4, 1, {2, 3}), (5, 2, 2, {2, 3})],
)
def test_every_layer_has_its_place(num_layers, p, v, allowed):
    make, batches = partial(GPT, num_layers=num_layers), [texts(4)]
    run, parts = parallel(make, batches, pipeline_parallel_size=p, virtual_pipeline_size=v, micro_batch_size=1)
    assert_same(run, serial(make, batches))
    counts = [len({name.split(".")[1] for name in part.initial if name.startswith("blocks.")}) for part in parts]
    assert sum(counts) == num_layers
    assert set(counts) <= allowed


def test_no_parameter_has_two_owners():
    _, parts = parallel(partial(GPT, num_layers=5), [texts(4)], pipeline_parallel_size=4, micro_batch_size=1)
    assert max(Counter(name for part in parts for name in part.initial).values()) == 1


def test_stage_without_a_layer_is_refused():
    with pytest.raises(SpmdError, match="each of the p \\* v = 4 stages needs a block, and 'blocks' has 3"):
        parallel(partial(GPT, num_layers=3), [texts(4)], pipeline_parallel_size=4)
