"""Where the evaluation loop is: the strategy's steps are not told which batch they run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.utils import _pytree as pytree

from lightning_ptdp.loaders import ghost_batch


class EvaluationProgress(Callback):
    """Knows the number of the batch that is evaluated, and whether it counts on this replica."""

    def __init__(self) -> None:
        self.batch_idx, self.dataloader_idx, self.is_ghost = 0, 0, False

    def _start(self, loaders: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.batch_idx, self.dataloader_idx = batch_idx, dataloader_idx
        ghost = ghost_batch(pytree.tree_leaves(loaders)[dataloader_idx])
        self.is_ghost = ghost is not None and batch_idx >= ghost

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take note."""
        self._start(trainer.val_dataloaders, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take note."""
        self._start(trainer.test_dataloaders, batch_idx, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take note."""
        self.batch_idx, self.dataloader_idx, self.is_ghost = batch_idx, dataloader_idx, False
