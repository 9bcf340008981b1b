"""The checkpoints of a run: which files one is, who writes them, and what a load gives back.

a folder       that all ranks write, ours; `save_distributed_checkpoint=True`
one file       an ordinary one, put together on rank 0
a plug-in's    whatever a user's `CheckpointIO` makes of an ordinary one, or fsspec of a remote path
safetensors    of a Hugging Face model: weights for a run that starts, read only
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup

from lightning_ptdp.checkpoint.complete_or_absent import cut_off
from lightning_ptdp.checkpoint.contents import contents_of
from lightning_ptdp.checkpoint.pretrained import is_pretrained, read_pretrained
from lightning_ptdp.checkpoint.run_state import RunState
from lightning_ptdp.checkpoint.store import Store
from lightning_ptdp.comm.groups import Groups, world_copy

log = logging.getLogger(__name__)


def is_users(io: CheckpointIO) -> bool:
    """Whether a user gave this plug-in; Lightning's own leaves files to us."""
    return type(io) is not TorchCheckpointIO


class Checkpoints:
    """Saves, loads and deletes; every rank of the world calls its methods, with the same paths."""

    def __init__(self, groups: Groups) -> None:
        self._groups, self._store = groups, Store(groups.world)
        self._background: ProcessGroup | None = None

    def save(
        self,
        path: str,
        checkpoint: dict[str, Any],
        state: RunState,
        io: CheckpointIO,
        *,
        is_folder: bool,
        in_background: bool,
    ) -> None:
        """Save what the Trainer dumped on each rank.

        Args:
            checkpoint: the Trainer's, with this rank's state in it.
            is_folder: whether a folder is asked for, where no plug-in writes.
            in_background: whether training may go on while a folder is written.

        Raises:
            CheckpointError: on every rank, when one failed.
            ValueError: a folder was to be written to a file system that is not mounted.
        """
        contents = contents_of(checkpoint, state.local(), self._groups)
        if is_folder and not is_users(io):
            if "://" in path:
                raise ValueError(
                    f"a checkpoint folder is written to a mounted file system, got {path}; mount it, or use "
                    "save_distributed_checkpoint=False"
                )
            self._store.save_folder(Path(path), contents, self._background_world() if in_background else None)
        elif _is_for(io, path):
            self._store.save_file(Path(path), contents, lambda whole: io.save_checkpoint(whole, path))
        else:
            self._store.save_file(Path(path), contents)

    def _background_world(self) -> ProcessGroup:
        """A group of all ranks for saves that training does not wait for."""
        if self._background is None:
            self._background = world_copy()
        return self._background

    def load(
        self, path: str, state: RunState, io: CheckpointIO, *, num_optimizers: int, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load a checkpoint that any layout saved, or no strategy: of a folder, what this rank holds.

        Args:
            num_optimizers: how many optimizers the run has to restore.
            weights_only: as in `torch.load`.

        Raises:
            CheckpointError: on every rank, when a file is missing or damaged.
        """
        for folder in cut_off(Path(path).parent):
            rank_zero_warn(f"{folder} was passed over: its writing was cut off; {path} is loaded")
        return self._store.load(
            path,
            state.local(),
            state.held(),
            num_optimizers,
            (lambda: io.load_checkpoint(path, weights_only=weights_only)) if _is_for(io, path) else None,
            weights_only=weights_only,
        )

    def is_pretrained(self, path: str) -> bool:
        """Whether a path leads to the safetensors of a Hugging Face model."""
        return is_pretrained(path, self._groups.world)

    def load_pretrained(
        self, path: str, module: pl.LightningModule, state: RunState, optimizer_states: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Read the weights of the module's Hugging Face model, as a checkpoint of a run that has not begun.

        Args:
            optimizer_states: as they are.
        """
        return {
            "pytorch-lightning_version": pl.__version__,
            "state_dict": read_pretrained(path, module, state.local(), state.aliases, self._groups.world),
            "optimizer_states": optimizer_states,
            "lr_schedulers": [],
        }

    def remove(self, path: Path, io: CheckpointIO) -> None:
        """Delete a checkpoint, after a save that is under way."""
        self._store.remove(path, lambda: io.remove_checkpoint(path))

    def wait(self) -> None:
        """Wait for a save that is under way.

        Raises:
            CheckpointError: on every rank, when it failed.
        """
        self._store.wait()

    def close(self, *, has_failed: bool) -> None:
        """Wait for a save that is under way, for the last time.

        Args:
            has_failed: whether the run has; its own failure is being raised, and that of a save only logged.
        """
        try:
            self._store.close()
        except Exception as error:
            if not has_failed:
                raise
            log.warning("the save in the background failed, too: %s", error)


def _is_for(io: CheckpointIO, path: str) -> bool:
    """Whether a file is the plug-in's to write and read."""
    return is_users(io) or "://" in path
