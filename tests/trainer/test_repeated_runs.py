"""One module goes through several runs: it stays split, and its numbers are those of one process."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, texts
from tests.oracle import Recorder, ReplicaBatches, join, quiet_trainer, serial
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

MAKE = partial(GPT, optimizer="momentum", tied=True)
BATCHES = [texts(4, seed=i) for i in range(2)]


class Validated(GPT):
    """A GPT that validates on what it trains on."""

    def validation_step(self, batch, batch_idx):
        """Log the loss."""
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)


def strategy(t, p, v):
    return PTDPStrategy(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        virtual_pipeline_size=v,
        micro_batch_size=1,
        tensor_parallel_plan=PLAN if t > 1 else None,
    )


def fit_twice(sizes):
    """Two runs of fit, each with a new optimizer, by two Trainers."""
    module, parts = MAKE(), []
    for _ in range(2):
        recorder = Recorder()
        trainer = quiet_trainer(
            strategy(*sizes), callbacks=[recorder], precision="64-true", use_distributed_sampler=False
        )
        trainer.fit(module, datamodule=ReplicaBatches(BATCHES))
        parts.append(recorder.part)
    return parts


def serial_twice():
    module = MAKE()
    return [serial(lambda: module, BATCHES), serial(lambda: module, BATCHES)][1]


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (2, 2, 2)], ids=["p2", "t2", "t2p2v2"])
def test_second_fit_goes_on_from_the_first(sizes):
    runs = run_spmd(fit_twice, world_size=sizes[0] * sizes[1], timeout=60, sizes=sizes)
    second = join([parts[1] for parts in runs])
    for name, expected in serial_twice().weights[-1].items():
        torch.testing.assert_close(second.weights[-1][name], expected, rtol=0, atol=1e-10)


def fit_then_validate(sizes):
    module = Validated()
    trainer = quiet_trainer(strategy(*sizes), precision="64-true", use_distributed_sampler=False)
    data = ReplicaBatches(BATCHES)
    data.val_dataloader = data.train_dataloader
    before = trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"]
    trainer.fit(module, datamodule=data)
    after = trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"]
    return before, after


def test_validation_before_and_after_fit_is_that_of_one_process():
    (one,) = run_spmd(fit_then_validate, world_size=1, timeout=60, sizes=(1, 1, 1))
    for got in run_spmd(fit_then_validate, world_size=4, timeout=60, sizes=(2, 2, 1)):
        assert got == pytest.approx(one, rel=1e-10)
    assert one[1] < one[0]


def refit(sizes, others):
    module = MAKE()
    quiet_trainer(strategy(*sizes), precision="64-true", use_distributed_sampler=False).fit(
        module, datamodule=ReplicaBatches(BATCHES)
    )
    with pytest.raises(ValueError, match="the module was split for tensor_parallel_size=1 and 2 stages"):
        quiet_trainer(strategy(*others), precision="64-true", use_distributed_sampler=False).fit(
            module, datamodule=ReplicaBatches(BATCHES)
        )


def test_another_layout_for_a_split_module_is_refused():
    run_spmd(refit, world_size=2, timeout=60, sizes=(1, 2, 1), others=(1, 1, 1))


def build_in_trainer():
    trainer = quiet_trainer(strategy(1, 2, 1), precision="64-true", use_distributed_sampler=False)
    pl.seed_everything(1, verbose=False)
    with trainer.init_module():
        module = MAKE()
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer.fit_loop.max_epochs = 0
    assert all(p.dtype == torch.float64 and p.device.type == "cpu" for p in expected.values())
    return sum(p.sum().item() for p in expected.values())


def test_module_built_by_the_trainer_is_the_plain_one():
    pl.seed_everything(1, verbose=False)
    torch.set_default_dtype(torch.float64)
    try:
        plain = sum(p.sum().item() for p in MAKE().parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    assert run_spmd(build_in_trainer, world_size=2) == pytest.approx([plain, plain])
