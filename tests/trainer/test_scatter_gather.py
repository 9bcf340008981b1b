"""Tensor peers send what they hold alike in parts, and nothing else: the same bits for 1/t of the bytes."""

from functools import partial
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from benchmarks.traffic import Traffic
from lightning_ptdp import PTDPStrategy
from tests.models import GPT, points, texts
from tests.oracle import ReplicaBatches, assert_same, join, parallel, quiet_trainer, serial, train
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

BATCHES = [texts(4, seed=i) for i in range(3)]


def counted(v, scatter_gather):
    """This rank's part of a run, and the numbers that it sent to other stages."""
    strategy = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": v,
        "micro_batch_size": 1,
        "tensor_parallel_plan": PLAN,
        "scatter_gather": scatter_gather,
    }
    with Traffic() as traffic:
        part = train(partial(GPT, tied=True), BATCHES, {}, strategy)
    return part, traffic.elements(operation="send", dtype=torch.float64)


@pytest.mark.parametrize(("v", "crossings"), [(1, 1), (2, 3)])
def test_bits_are_those_of_tensors_sent_whole(v, crossings):
    """crossings: of activations and gradients that a rank of the pipeline sends on, for each microbatch."""
    results = [run_spmd(counted, world_size=4, timeout=60, v=v, scatter_gather=given) for given in (True, False)]
    shared, whole = (join([part for part, _ in ranks]) for ranks in results)
    assert shared.losses == whole.losses
    for mine, theirs in zip(shared.gradients + shared.weights, whole.gradients + whole.weights, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    sent = crossings * 3 * 4 * 16 * 32  # batches, rows, length, hidden
    assert [[count for _, count in ranks] for ranks in results] == [[sent / 2] * 4, [sent] * 4]


class CarryingBlock(nn.Module):
    """Hands on three tensors: what is whole on tensor peers, what each has its heads of, and a scale that is whole, but
    whose gradient each peer has a part of."""

    def __init__(self, *, is_first):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8)) if is_first else None

    def forward(self, x, carried=0.0, scale=None):
        scale = self.scale if scale is None else scale
        carried = (torch.tanh(self.up(x)).unflatten(-1, (-1, 8)) * scale).flatten(-2) + carried
        return x + self.down(carried), carried, scale


class CarryingNet(pl.LightningModule):
    """What crosses a cut is not the same on tensor peers."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "blocks.0.scale": "replicated_with_grad_allreduce",
    }

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(CarryingBlock(is_first=i == 0) for i in range(4))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x = (batch["x"],)
        for block in self.blocks:
            x = block(*x)
        return (self.head(x[0])[:, 0] - batch["y"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("v", [1, 2])
def test_what_differs_between_peers_is_sent_whole(v):
    batches = [points(4, seed=i) for i in range(3)]
    run, _ = parallel(
        CarryingNet,
        batches,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        virtual_pipeline_size=v,
        micro_batch_size=1,
    )
    assert_same(run, serial(CarryingNet, batches))


class DriftingNet(CarryingNet):
    """From the second batch on, peers work on values of their own."""

    def training_step(self, batch, batch_idx):
        rank = self.trainer.strategy.groups.at.tensor
        return super().training_step({**batch, "x": batch["x"] + rank * batch_idx}, batch_idx)


def drift():
    trainer = quiet_trainer(PTDPStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=1))
    with pytest.raises(RuntimeError, match="use scatter_gather=False") as caught:
        trainer.fit(DriftingNet(), datamodule=ReplicaBatches([points(4, seed=i) for i in range(3)]))
    return str(caught.value), trainer.global_step


def test_what_stops_being_alike_ends_the_run_before_a_weight_changes():
    told = run_spmd(drift, world_size=4, timeout=60)
    assert all("hold the activations that stage 0 sends" in text for text, _ in told)
    assert [step for _, step in told] == [1] * 4
