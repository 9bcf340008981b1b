"""Saves what a run needs besides its model to go on as if it had not stopped: random generators, loaders' positions."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ptdp.comm.collectives import gather_objects_to
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.generators import generators, random_state, set_random_state
from lightning_ptdp.loaders.replicas import EvenLoader, leaves
from lightning_ptdp.loaders.resumable import Position, ResumableLoader

KEY = "lightning_ptdp"
"""The key of a checkpoint under which the state of `Resuming` lies."""


class Resuming(Callback):
    """Saves a run's random generators and loaders' positions, and goes back to them; the same calls on every rank."""

    def __init__(self, trainer: pl.Trainer, groups: Groups, device: torch.device, layout: Mapping[str, int]) -> None:
        """
        Args:
            trainer: whose loaders are meant.
            groups: of this rank.
            device: whose random generators are saved, beside those of the host.
            layout: t, p and so on by name; another one means other ranks.
        """
        self._trainer, self._groups, self._device, self._layout = trainer, groups, device, dict(layout)
        self.is_set_up = False
        self._random: dict[str, Any] | None = None
        self._positions: list[Position] = []
        self._reloads: int | None = None

    # -- saving ----------------------------------------------------------------------------------------------------

    def state(self, seed: int) -> dict[str, Any]:
        """Collect what goes into a checkpoint; every rank calls it, and global rank 0 has that of all.

        Args:
            seed: of the named random streams.

        Returns:
            seed, layout; states: the different ones among those of the ranks; ranks: the number of its state, for each.
        """
        progress, window = self._trainer.fit_loop.epoch_loop.batch_progress, self._trainer.accumulate_grad_batches
        trained, is_over = progress.current.ready, progress.is_last_batch
        if trained % window and not is_over:
            rank_zero_warn(
                f"this checkpoint is saved {trained % window} batches into a window of accumulate_grad_batches="
                f"{window}; their gradients are not saved, so a run resumed from it differs in one step; save when "
                "global_step has moved, as ModelCheckpoint does"
            )
        positions = [loader.position(trained, is_over=is_over) for loader in self._loaders()]
        mine = {"random": random_state(self._device), "loaders": positions}
        everyone = gather_objects_to(mine, 0, self._groups.world) or [mine]
        different: dict[bytes, int] = {}
        ranks = [different.setdefault(pickle.dumps(one), len(different)) for one in everyone]
        states = [pickle.loads(text) for text in different]  # what was just pickled
        return {"seed": seed, "layout": self._layout, "ranks": ranks, "states": states}

    # -- going on --------------------------------------------------------------------------------------------------

    def take(self, saved: Mapping[str, Any] | None, seed: int) -> int:
        """Keep what a checkpoint holds until it is needed.

        Args:
            saved: what `state` returned; None if the checkpoint was written without this package.
            seed: what to return then.

        Returns:
            The seed of the checkpoint's named random streams.
        """
        if saved is None:
            return seed
        ranks, states = saved["ranks"], saved["states"]
        is_same = saved["layout"] == self._layout
        mine = states[ranks[self._groups.world.rank()] if is_same else 0]
        self._positions = list(mine["loaders"])
        if (is_same or len(states) == 1) and len(mine["random"]["torch"]) == len(generators(self._device)):
            self._random = mine["random"]
        else:
            rank_zero_info(
                f"the generators of torch, NumPy and Python start afresh under {self._layout}: in the checkpoint, "
                f"saved under {saved['layout']}, each rank has its own; dropout's seed and the loaders' places go on"
            )
        for loader in self._loaders():  # they are there if configure_optimizers asked for their length
            self._put_where_it_was(loader)
            if loader.is_of_other_length:
                rank_zero_warn(
                    "configure_optimizers asked for the number of batches before the checkpoint was loaded; the epoch "
                    "that is resumed under another global batch has another number, and ends after "
                    f"{loader.usual_length} at the latest"
                )
        return int(saved["seed"])

    def resumable(self, loader: object, warn: Callable[[str], None]) -> ResumableLoader:
        """Wrap a training loader, so that it starts where the checkpoint left it."""
        ready = ResumableLoader(
            loader,
            num_replicas=self._groups.topology.data_parallel_size,
            restore=self.restore if self._trainer.ckpt_path or not self.is_set_up else None,
            shows=self._trainer.is_global_zero and self._trainer.progress_bar_callback is not None,
            warn=warn,
        )
        self._put_where_it_was(ready)
        return ready

    def restore(self) -> None:
        """Put the random generators where the checkpoint found them; a second call does nothing."""
        if self._random is not None:
            set_random_state(self._random, self._device)
            self._random = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the Trainer count the batches again, if the rest of an epoch is dealt to another number of replicas.

        It counts when it makes loaders again, so it is told to do that at this epoch.
        """
        if any(loader.is_of_other_length for loader in self._loaders()):
            options: Any = trainer  # where Lightning's connector sets it
            self._reloads, options.reload_dataloaders_every_n_epochs = options.reload_dataloaders_every_n_epochs, 1

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the Trainer its own setting back: it has counted the batches by now."""
        if self._reloads is not None:
            options: Any = trainer
            options.reload_dataloaders_every_n_epochs, self._reloads = self._reloads, None

    def _put_where_it_was(self, loader: ResumableLoader) -> None:
        if self._positions:
            loader.resume(self._positions.pop(0))

    def _loaders(self) -> list[ResumableLoader]:
        found = leaves(self._trainer.train_dataloader)
        inner = [loader.loader if isinstance(loader, EvenLoader) else loader for loader in found]
        return [loader for loader in inner if isinstance(loader, ResumableLoader)]
