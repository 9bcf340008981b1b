"""Where the loops are: steps and hooks are not told which batch they are about."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.utils import _pytree as pytree

from lightning_ptdp.batch import num_samples
from lightning_ptdp.loaders import ghost_batch


class LoopProgress(Callback):
    """Knows the batch that is evaluated, and whether it counts on this replica; the first of all callbacks.

    num_samples: of the batch that is trained on or evaluated, 0 if it does not count; None outside of batches.
    """

    def __init__(self) -> None:
        self.batch_idx, self.dataloader_idx, self.is_ghost = 0, 0, False
        self.num_samples: int | None = None

    def _start(self, loaders: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.batch_idx, self.dataloader_idx = batch_idx, dataloader_idx
        ghost = ghost_batch(pytree.tree_leaves(loaders)[dataloader_idx])
        self.is_ghost = ghost is not None and batch_idx >= ghost
        self.num_samples = 0 if self.is_ghost else num_samples(batch)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take note."""
        self.num_samples = num_samples(batch)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take note."""
        self._start(trainer.val_dataloaders, batch, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take note."""
        self._start(trainer.test_dataloaders, batch, batch_idx, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take note."""
        self.batch_idx, self.dataloader_idx, self.is_ghost = batch_idx, dataloader_idx, False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the batch of the training loop."""
        self.num_samples = None

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the last batch."""
        self.num_samples = None

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the last batch."""
        self.num_samples = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the last batch, and compute logged metrics on all ranks, before one asks for them alone."""
        self.num_samples = None
        _ = trainer.callback_metrics
