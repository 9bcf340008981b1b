"""Saves and loads a run's checkpoints: folders written by all ranks, or one ordinary file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lightning_ptdp.checkpoint import complete_or_absent
from lightning_ptdp.checkpoint.background import Background
from lightning_ptdp.checkpoint.contents import Contents, plain_checkpoint
from lightning_ptdp.checkpoint.errors import CheckpointError
from lightning_ptdp.checkpoint.folder import Folder, is_folder
from lightning_ptdp.checkpoint.local_state import LocalState
from lightning_ptdp.checkpoint.saving import newest_complete, save_folder, together, verify
from lightning_ptdp.checkpoint.single import gather_whole, save_file
from lightning_ptdp.comm.collectives import gather_objects

SaveWhole = Callable[[dict[str, Any]], None]
LoadWhole = Callable[[], dict[str, Any]]


class Store:
    """Saves, loads and deletes checkpoints; every rank of the world calls its methods, with the same paths."""

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._background = Background()

    def save_folder(self, path: Path, contents: Contents, background_world: ProcessGroup | None = None) -> None:
        """Save a folder; with a background group, return once the tensors are copied.

        Args:
            path: of the folder.
            contents: what this rank contributes.
            background_world: a group of all ranks that nothing else uses while the save goes on; None saves at once.

        Raises:
            CheckpointError: on every rank, when one failed; of a save in the background, at the next call.
        """
        self._background.wait()
        if background_world is None:
            _save(path, contents, self._world)
            return
        group, copied = background_world, contents.copied()
        self._background.start(lambda: _save(path, copied, group))

    def save_file(self, path: Path, contents: Contents, save_whole: SaveWhole | None = None) -> None:
        """Save one ordinary file, the same that one process would save.

        Args:
            path: of the file.
            contents: what this rank contributes.
            save_whole: writes the file on rank 0, with all tensors in memory; None writes tensor by tensor.

        Raises:
            CheckpointError: on every rank, when one failed.
        """
        self._background.wait()

        def assemble(values: Mapping[Any, Any]) -> dict[str, Any]:
            return plain_checkpoint(contents.rest, contents.order, values)

        def act() -> None:
            if save_whole is None:
                save_file(path, contents.tensors, contents.objects, assemble)
                return
            whole = gather_whole(contents.tensors, contents.objects, assemble)
            if self._world.rank() == 0:
                save_whole(whole)

        together(act, self._world, f"saving the checkpoint {path} failed")

    def load(
        self,
        path: str,
        local: LocalState,
        module: Mapping[str, Any],
        num_optimizers: int,
        load_whole: LoadWhole | None,
        *,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Load a checkpoint: of a folder this rank's part of the state, of one file the whole.

        Args:
            path: of the checkpoint, or the name that `load_whole` knows it by.
            local: where what this rank holds lies in the whole.
            module: the module's state, whose tensors are filled in place.
            num_optimizers: how many optimizers the run has to restore.
            load_whole: reads a file that is not on a mounted file system.
            weights_only: as in `torch.load`.

        Raises:
            CheckpointError: on every rank, when a file is missing or damaged.
        """
        self._background.wait()
        where = Path(path)
        together(
            (lambda: complete_or_absent.recover(where)) if self._world.rank() == 0 else None,
            self._world,
            "loading failed",
        )
        loaded: dict[str, Any] = {}

        def act() -> None:
            if not is_folder(where):
                loaded.update(_load_file(path, load_whole, weights_only=weights_only))
                return
            folder = Folder(where)
            loaded.update(folder.meta(weights_only=weights_only))
            loaded["state_dict"] = local.read_module(folder, module)
            loaded.update({top: local.read_other(folder, top, module) for top in folder.other_states()})
            if folder.objects("optimizer_0"):
                loaded["optimizer_states"] = [local.read_optimizer(folder, i) for i in range(num_optimizers)]

        try:
            if any(gather_objects(where.is_dir(), self._world)):
                verify(where, self._world, contents=False)
            together(act, self._world, f"loading the checkpoint {path} failed")
        except CheckpointError as error:
            if not error.is_damage:
                raise
            other = newest_complete(where, self._world)
            advice = (
                "no whole checkpoint is beside it" if other is None else f"the newest whole one beside it is {other}"
            )
            raise CheckpointError(f"{error}; {advice}") from error
        return loaded

    def remove(self, path: Path, remove_whole: Callable[[], None]) -> None:
        """Delete a checkpoint on rank 0, after the save that is under way.

        Args:
            path: of the checkpoint.
            remove_whole: deletes it if it is no folder of ours.
        """
        if self._world.rank() != 0:
            return
        self._background.after(lambda: complete_or_absent.remove(path) if is_folder(path) else remove_whole())

    def wait(self) -> None:
        """Wait for a save that is under way.

        Raises:
            CheckpointError: on every rank, when it failed.
        """
        self._background.wait()

    def close(self) -> None:
        """Wait for a save that is under way, and end its thread."""
        self._background.close()


def _save(path: Path, contents: Contents, group: ProcessGroup) -> None:
    save_folder(path, contents.tensors, contents.objects, contents.rest, contents.order, group)


def _load_file(path: str, load_whole: LoadWhole | None, *, weights_only: bool | None) -> dict[str, Any]:
    if load_whole is not None:
        return load_whole()
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    is_mappable = zipfile.is_zipfile(path)
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=is_mappable, weights_only=weights_only)
    return loaded
