"""Logs what training is doing, also where no progress bar can be drawn."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

log = logging.getLogger(__name__)


class Phases(Callback):
    """Logs the beginning and the end of training; without a terminal, also the metrics of the progress bar.

    Args:
        every_n_steps: optimizer steps between the lines with metrics; each validation has its own.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        self._every_n_steps = every_n_steps
        self._shows_metrics = not sys.stderr.isatty()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log.info(
            "training: %s under %s, world size %d, %s optimizer steps",
            type(pl_module).__name__,
            type(trainer.strategy).__name__,
            trainer.world_size,
            trainer.estimated_stepping_batches,
        )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if self._shows_metrics and (step == 1 or step % self._every_n_steps == 0):
            log.info("step %d: %s", step, as_text(trainer.progress_bar_metrics))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._shows_metrics and not trainer.sanity_checking:
            log.info("step %d, validated: %s", trainer.global_step, as_text(trainer.progress_bar_metrics))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback in trainer.checkpoint_callbacks:
            path = written_by(callback)
            if path:
                log.info("checkpoint: %s", path)
        log.info("trained: %d optimizer steps", trainer.global_step)


def as_text(metrics: Mapping[str, float | int | str]) -> str:
    """Write metrics as a line of text: "train_loss 4.171, val_loss 4.558"."""
    shown = {name: f"{value:.3f}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if name != "v_num")


def written_by(callback: Any) -> str:
    """Find the newest file of a checkpoint callback; "" if it has none or doesn't tell."""
    return (callback.last_model_path or callback.best_model_path) if isinstance(callback, ModelCheckpoint) else ""
