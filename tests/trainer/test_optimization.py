"""What Lightning's loop does around an optimizer step, under every layout as in one process."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.fits import LAYOUTS, Net, assert_like_one_process, batches_of


class Grouped(Net):
    """Weight decay for matrices only, another rate for the head, and a frozen embedding left out."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)

    def configure_optimizers(self):
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        assert len(trained) == 18, "configure_optimizers sees the whole model"
        head = [p for name, p in trained if name.startswith("head")]
        matrices = [p for name, p in trained if p.ndim == 2 and not name.startswith("head")]
        others = [p for name, p in trained if p.ndim == 1 and not name.startswith("head")]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1},
                {"params": others, "weight_decay": 0.0},
                {"params": head, "lr": 0.01},
            ],
            lr=0.05,
        )


class Scheduled(Net):
    """kind: of its schedule."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        lr = torch.optim.lr_scheduler
        if self.kind == "list":
            return [optimizer], [lr.StepLR(optimizer, 1, gamma=0.5)]
        steps = int(self.trainer.estimated_stepping_batches) if self.kind == "one cycle" else 0
        config = {
            "one cycle": lambda: {"scheduler": lr.OneCycleLR(optimizer, 0.2, steps), "interval": "step"},
            "step": lambda: {"scheduler": lr.ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 2},
            "epoch": lambda: {"scheduler": lr.ExponentialLR(optimizer, 0.5), "frequency": 2},
            "plateau": lambda: {"scheduler": lr.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5), "monitor": "loss"},
            "step plateau": lambda: {
                "scheduler": lr.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1),
                "monitor": "loss",
                "interval": "step",
            },
            "chained": lambda: {
                "scheduler": lr.SequentialLR(optimizer, [lr.LinearLR(optimizer, total_iters=2), lr.CosineAnnealingLR(optimizer, 4)], [2]),
                "interval": "step",
            },
            "overridden": lambda: lr.ExponentialLR(optimizer, 0.5),
        }[self.kind]()
        return {"optimizer": optimizer, "lr_scheduler": config}

    def lr_scheduler_step(self, scheduler, metric):
        if self.kind == "overridden":
            self.notes.append((type(scheduler).__name__, metric))
            if self.current_epoch:
                scheduler.step()
        else:
            super().lr_scheduler_step(scheduler, metric)


ROWS = {
    "plain": (Net, (4, 4, 2), {}),
    "accumulate": (Net, (4, 4, 4, 3, 4), {"accumulate_grad_batches": 2, "max_epochs": 2}),
    "clip": (Net, (4, 4, 4), {"gradient_clip_val": 0.1}),
    "clip value": (Net, (4, 4, 4), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "groups": (Grouped, (4, 4, 4), {"gradient_clip_val": 0.5}),
    "accumulate schedule": (Net, (4, 4, 4, 4, 3), {"max_epochs": 3, "callbacks": [partial(GradientAccumulationScheduler, {0: 2, 1: 3, 2: 1})]}),
    **{
        f"lr {kind}": (partial(Scheduled, kind), (4, 4, 4, 4, 2), {"max_epochs": 3, "accumulate_grad_batches": 2})
        for kind in ("list", "one cycle", "step", "epoch", "plateau", "step plateau", "chained", "overridden")
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", ROWS)
def test_rows(row, layout):
    make, sizes, trainer = ROWS[row]
    trainer = dict(trainer)
    callbacks = trainer.pop("callbacks", [])
    assert_like_one_process(layout, make, batches_of(*sizes), trainer=trainer, callbacks=callbacks)
