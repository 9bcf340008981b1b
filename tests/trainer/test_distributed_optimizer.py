"""Optimizer states sharded over the replicas: the same numbers, and tied weights with the same bits (PO-01)."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_ptdp import PTDPPrecision, PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, assert_same, parallel, quiet_trainer, serial
from tests.spmd import PoolEnvironment, run_spmd
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


class Memory(Callback):
    """Bytes a parameter that a rank holds after a step: weights, gradients, main weights and states."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (optimizer,) = trainer.optimizers
        held = [p for group in optimizer.param_groups for p in group["params"]]
        own = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}
        weights = sum(p.nbytes for p in pl_module.parameters())
        mains = sum(p.nbytes for p in held if p.untyped_storage().data_ptr() not in own)
        states = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.ndim)
        total = weights + trainer.strategy.engine.gradients.buffers.nbytes + mains + states
        self.of_parameter = total / sum(p.numel() for p in pl_module.parameters())


def bytes_of_parameter(precision, sharded):
    seed_everything()
    memory = Memory()
    trainer = quiet_trainer(
        PTDPStrategy(distributed_optimizer=sharded),
        callbacks=[memory],
        plugins=[PTDPPrecision(precision), PoolEnvironment()],
        use_distributed_sampler=False,
    )
    trainer.fit(GPT(hidden=128, optimizer="adamw"), datamodule=ReplicaBatches(BATCHES[:1]))
    return memory.of_parameter


@pytest.mark.parametrize(
    ("precision", "sharded", "expected"),
    [
        ("bf16-mixed", False, 16),
        ("bf16-mixed", True, 8 + 8 / 2),
        ("bf16-true", False, 18),
        ("bf16-true", True, 6 + 12 / 2),
    ],
)
def test_bytes_a_parameter_are_those_of_the_formula(precision, sharded, expected):
    found = run_spmd(bytes_of_parameter, precision=precision, sharded=sharded)
    assert sum(found) / 2 == pytest.approx(expected, rel=0.01)


def norm_of(sizes, sharded):
    seed_everything()
    t, p, d = sizes
    norms = []

    class Norm(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norms.append(float(trainer.strategy.gradient_norm()))

    strategy = PTDPStrategy(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        data_parallel_size=d,
        micro_batch_size=1,
        tensor_parallel_plan=PLAN if t > 1 else None,
        distributed_optimizer=sharded,
    )
    trainer = quiet_trainer(strategy, callbacks=[Norm()], precision="64-true", use_distributed_sampler=False)
    trainer.fit(GPT(tied=True), datamodule=ReplicaBatches(BATCHES))
    return norms


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_norm_is_that_of_one_process(sizes, sharded):
    t, p, d = sizes
    one = serial(partial(GPT, tied=True), BATCHES)
    expected = [torch.cat([g.reshape(-1) for g in step.values()]).norm().item() for step in one.gradients]
    for norms in run_spmd(norm_of, world_size=t * p * d, timeout=60, sizes=sizes, sharded=sharded):
        assert norms == pytest.approx(expected, rel=1e-6)
