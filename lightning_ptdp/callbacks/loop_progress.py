"""Follows where the Trainer's loops are, since steps and hooks are not told which batch they are about."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback

from lightning_ptdp.engine.microbatches import num_samples
from lightning_ptdp.host.torch import pytree
from lightning_ptdp.loaders.replicas import ghosts, leaves


class LoopProgress(Callback):
    """Knows the batch that is trained on or evaluated, and whether it counts on this replica.

    It goes first among the Trainer's callbacks, so that the hooks of others find it up to date.

    Attributes:
        batch_idx: number of that batch in its loader.
        dataloader_idx: number of the loader.
        is_ghost: whether the batch does not count on this replica.
        num_samples: rows of the batch, 0 if it does not count; None outside of batches.
    """

    def __init__(self) -> None:
        self.batch_idx, self.dataloader_idx, self.is_ghost = 0, 0, False
        self.num_samples: int | None = None

    def _start(self, loaders: Any, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
        """Note a batch, and whether it counts.

        Args:
            loaders: the Trainer's collection of them.
            batch: of one loader, or, where dataloader_idx is None and there are several, a collection of parts.
            batch_idx: number of the batch in its loader.
            dataloader_idx: number of the loader; None where there is one, or one batch of several.
        """
        self.batch_idx, self.dataloader_idx = batch_idx, dataloader_idx or 0
        found = leaves(loaders)
        if dataloader_idx is None and len(found) > 1:
            self.is_ghost = _is_ghost(loaders, batch, batch_idx)
        else:
            source = ghosts(found[self.dataloader_idx])
            self.is_ghost = source is not None and source.ghost_batch is not None and batch_idx >= source.ghost_batch
        self.num_samples = 0 if self.is_ghost else num_samples(batch)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch."""
        self.num_samples = num_samples(batch)

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *position: Any) -> None:
        """Note the batch."""
        self._start(trainer.val_dataloaders, *position)

    def on_test_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *position: Any) -> None:
        """Note the batch."""
        self._start(trainer.test_dataloaders, *position)

    def on_predict_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the batch."""
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


def _is_ghost(loaders: Any, batch: Any, batch_idx: int) -> bool:
    """Whether a batch of parts, one a loader, must not count on this replica.

    Raises:
        ValueError: on some replica a part counts and another must not.
    """
    sources = {i: source for i, loader in enumerate(leaves(loaders)) if (source := ghosts(loader)) is not None}
    if not any(ghost is not None for source in sources.values() for ghost in source.ghost_batches):
        return False
    parts = pytree.tree_structure(loaders).flatten_up_to(batch)  # None where a shorter loader has ended
    present = [i for i, part in enumerate(parts) if part is not None]
    lengths = [sized_len(loader) or batch_idx + 1 for loader in leaves(loaders)]  # a shorter one may start again

    def absent(replica: int) -> list[int]:
        at = {i: sources[i].ghost_batches[replica] for i in present if i in sources}
        return [i for i, ghost in at.items() if ghost is not None and batch_idx % lengths[i] >= ghost]

    any_source = next(iter(sources.values()))
    for replica in range(len(any_source.ghost_batches)):
        if 0 < len(absent(replica)) < len(present):
            raise ValueError(
                f"batch {batch_idx} joins parts of loaders {present}, and on replica {replica} those of loaders "
                f"{absent(replica)} have no such batch, while the others have; a CombinedLoader whose mode is not "
                '"sequential" needs loaders that end on all replicas at once: set drop_last=True in them, give them as '
                "many samples, or evaluate one after the other"
            )
    return bool(absent(any_source.replica))
