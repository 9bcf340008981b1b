"""`trainer.should_stop` becomes one decision of all ranks: the loops read it on each, and would part.

So does a signal. Lightning's own handler of SIGTERM meets the other ranks in a collective, wherever the signal comes,
and waits for ever if they have got none. Ours takes note, and the ranks agree when the step has ended.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

_STOP, _SIGNAL, _SIGNAL_SAVED = 1, 2, 3  # what a rank asks for; of all ranks the greatest holds


class StopTogether(Callback):
    """Stops training on all ranks where a step or a callback of any rank asked for it, or a signal came to any.

    It goes last in the Trainer's list. A training step is the commonest place: only the last stage of a pipeline
    reaches what follows the model. After a signal training ends with Lightning's `SIGTERMException`.
    """

    def __init__(self, saved_on: Sequence[int] = ()) -> None:
        """saved_on: signals on which a checkpoint is saved before training ends."""
        self._saved_on = frozenset(saved_on)
        self._earlier: dict[int, Any] = {}
        self._asked = 0

    def watch(self) -> None:
        """Note who handles the signals, before Lightning does."""
        self._asked = 0
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.getsignal(number) for number in {signal.SIGTERM, *self._saved_on}}

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handle signals."""
        self._listen()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handle signals."""
        self._listen()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave signals to who had them before."""
        self._give_back()

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave signals to who had them before."""
        self._give_back()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave signals to who had them before, where this is no validation within training."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._give_back()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let all ranks stop if one asked for it."""
        ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        self._agree(trainer, heeds_signals=ends_step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let all ranks stop if one asked for it."""
        self._agree(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let all ranks stop if one asked for it."""
        self._agree(trainer)

    def _listen(self) -> None:
        for number in self._earlier:
            signal.signal(number, self._take)

    def _give_back(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember it until the ranks agree. The same once more ends the process at once."""
        self._asked = max(self._asked, _SIGNAL_SAVED if number in self._saved_on else _SIGNAL)
        signal.signal(number, signal.SIG_DFL)
        earlier = self._earlier[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _agree(self, trainer: pl.Trainer, *, heeds_signals: bool = False) -> None:
        mine = max(self._asked if heeds_signals else 0, _STOP if trainer.should_stop else 0)
        strategy: Any = trainer.strategy
        asked = int(strategy.reduce(torch.tensor(mine), strategy.groups.world, "max"))
        if asked == _SIGNAL_SAVED:
            path = _path_for_signals(trainer)
            trainer.save_checkpoint(path)
            strategy.checkpoints.wait()
            rank_zero_info(
                f"a signal came: {path} was saved, and training ends; it goes on with ckpt_path={str(path)!r}"
            )
        if asked >= _SIGNAL:
            raise SIGTERMException
        trainer.should_stop = asked == _STOP


def _path_for_signals(trainer: pl.Trainer) -> Path:
    """A path beside the run's checkpoints, where `ckpt_path="last"` looks, or in its root without a ModelCheckpoint."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath, f"{callback.CHECKPOINT_NAME_LAST}-signal{callback.FILE_EXTENSION}")
    return Path(trainer.default_root_dir, "last-signal.ckpt")
