"""`trainer.should_stop` becomes one decision of all ranks: the loops read it on each, and would part."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class StopTogether(Callback):
    """Stops training on all ranks where a step or a callback of any rank asked for it. Goes last in the Trainer's list.

    A training step is the commonest place: only the last stage of a pipeline reaches what follows the model.
    """

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree."""
        _agree(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agree."""
        _agree(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agree."""
        _agree(trainer)


def _agree(trainer: pl.Trainer) -> None:
    trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)
