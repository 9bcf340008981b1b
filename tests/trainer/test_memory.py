"""1F1B bounds what a rank holds: microbatches between forward and backward (PO-24)."""

import gc
import weakref

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_ptdp import PTDPStrategy
from tests.kept import Kept
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd

NUM_STEPS = 10


class Watched(nn.Module):
    """A block, one a stage, that knows which of its inputs and outputs are alive; its graph keeps no output."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.inputs, self.outputs = nn.Linear(4, 4), inputs, outputs

    def forward(self, x):
        self.inputs.enter(x)
        y = x + torch.tanh(self.linear(x))
        self.outputs.enter(y.untyped_storage())
        return y


class Peak:
    """The most objects that were alive at once, for each step."""

    def __init__(self):
        self.alive, self.of_steps = [], []

    def enter(self, item):
        self.alive = [reference for reference in self.alive if reference() is not None] + [weakref.ref(item)]
        self.of_steps[-1] = max(self.of_steps[-1], len(self.alive))


class WatchedNet(pl.LightningModule):
    """Four blocks of which each is a stage."""

    def __init__(self):
        super().__init__()
        self.peaks = Kept((Peak(), Peak()))
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Watched(*self.peaks.value) for _ in range(4))

    def on_train_batch_start(self, batch, batch_idx):
        for peak in self.peaks.value:
            peak.of_steps.append(0)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def peaks(p, v, schedule):
    """Where this rank stands, and its peaks of inputs and of outputs in each step."""
    module = WatchedNet()
    trainer = quiet_trainer(
        PTDPStrategy(
            pipeline_parallel_size=p,
            virtual_pipeline_size=v,
            micro_batch_size=1,
            schedule=schedule,
            pipeline_split=(1, 1, 1, 1),
        )
    )
    gc.disable()  # what only a collection frees is held too long
    try:
        trainer.fit(module, datamodule=ReplicaBatches([torch.randn(8, 4) for _ in range(NUM_STEPS)]))
    finally:
        gc.enable()
    return trainer.strategy.groups.at.pipeline, [peak.of_steps for peak in module.peaks.value]


@pytest.mark.parametrize(
    ("p", "v", "schedule", "bounds"),
    [(4, 1, "1f1b", [4, 3, 2, 1]), (2, 2, "interleaved", [5, 3]), (4, 1, "gpipe", [8, 8, 8, 8])],
)
def test_live_microbatches_stay_at_the_bound_in_every_step(p, v, schedule, bounds):
    found = dict(run_spmd(peaks, world_size=p, p=p, v=v, schedule=schedule))
    inputs, outputs = zip(*(found[rank] for rank in range(p)), strict=True)
    assert list(inputs) == [[bound] * NUM_STEPS for bound in bounds]
    for of_steps in outputs[:-1]:  # the last stage sends none
        assert max(of_steps) <= 3, "the one just made, and two that may be on their way"
