"""Clipping counts each weight of the model once, and users' hooks see finished gradients (PO-02)."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_ptdp import PTDPStrategy
from tests.fits import Tracker
from tests.hygiene import seed_everything
from tests.kept import Kept
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd


class A(nn.Module):
    """One element, on stage 0 and held whole by both tensor peers; its gradient is 3."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class B(nn.Module):
    """Four elements, on stage 1 and split over tensor peers; the gradient of each is 2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 4, bias=False)
        nn.init.constant_(self.linear.weight, 0.375)

    def forward(self, x):
        return self.linear(x)


class FiveLong(pl.LightningModule):
    """Its gradient is (3, 2, 2, 2, 2), of norm 5. seen: what `configure_gradient_clipping` found."""

    def __init__(self, has_hook):
        super().__init__()
        self.blocks = nn.ModuleList([A(), B()])
        self.has_hook, self.seen = has_hook, Kept([])

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            x = block(x)
        return 2 * x.sum(1).mean()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.has_hook:
            found = {name: p.grad.flatten().tolist() for name, p in self.named_parameters()}
            self.seen.value.append((found, float(self.trainer.strategy.gradient_norm())))
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def clipped(algorithm, has_hook):
    """Weights at the end on rank 0, what the hook saw, and this rank's stage."""
    seed_everything()
    strategy = PTDPStrategy(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        micro_batch_size=1,
        tensor_parallel_plan={"blocks.*.linear": "colwise_gather_output"},
    )
    module, tracker = FiveLong(has_hook), Tracker()
    trainer = quiet_trainer(
        strategy,
        callbacks=[tracker],
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        gradient_clip_algorithm=algorithm,
    )
    trainer.fit(module, datamodule=ReplicaBatches([torch.ones(2, 1)]))
    return tracker.fit.weights, module.seen.value, strategy.groups.at.pipeline


@pytest.mark.parametrize("has_hook", [False, True], ids=["", "with a hook"])
@pytest.mark.parametrize(("algorithm", "moves"), [("norm", (0.6, 0.4)), ("value", (1.0, 1.0))])
def test_weights_move_by_the_clipped_gradient(algorithm, moves, has_hook):
    results = run_spmd(clipped, world_size=4, algorithm=algorithm, has_hook=has_hook)
    weights = results[0][0]
    assert weights["blocks.0.weight"].tolist() == pytest.approx([1 - moves[0]], abs=1e-5)
    assert weights["blocks.1.linear.weight"].flatten().tolist() == pytest.approx([0.375 - moves[1]] * 4, abs=1e-5)
    for _, seen, stage in results:
        if has_hook:
            expected = {"blocks.1.linear.weight": [2.0, 2.0]} if stage else {"blocks.0.weight": [3.0]}
            assert seen == [(expected, pytest.approx(5.0))], "once a step"
