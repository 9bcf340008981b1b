"""A whole checkpoint in one process, whatever its form."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from lightning_ptdp.checkpoint.contents import plain_checkpoint
from lightning_ptdp.checkpoint.folder import Folder, Keys, Stored, is_folder
from lightning_ptdp.checkpoint.rectangles import Located, Location


def read_checkpoint(path: str | Path, *, optimizers: bool = True, weights_only: bool = True) -> dict[str, Any]:
    """The ordinary nested checkpoint of a folder or a file, on the host, without any process group.

    optimizers: whether the states of optimizers are read too. weights_only: as in `torch.load`, True runs no code that
    the checkpoint holds.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the folder is no checkpoint.
        RuntimeError: a file of it is missing or damaged.
    """
    where = Path(path)
    check_exists(where)
    if where.is_file():
        loaded = _load(where, weights_only=weights_only)
        if not optimizers:
            loaded.pop("optimizer_states", None)
        return loaded
    folder = Folder(where)
    stored, objects = contents(folder, optimizers=optimizers)
    tensors = {keys: torch.empty(found.size, dtype=found.dtype) for keys, found in stored.items()}
    located: dict[Keys, Located] = {keys: Location.whole(tuple(t.shape)).of(t) for keys, t in tensors.items()}
    values = {**tensors, **folder.read(located, objects)}
    return plain_checkpoint(folder.meta(weights_only=weights_only), names_of(folder), values)


def read_rest(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """All of a checkpoint but weights and optimizers; the errors are those of `read_checkpoint`."""
    where = Path(path)
    check_exists(where)
    loaded = (
        _load(where, weights_only=weights_only) if where.is_file() else Folder(where).meta(weights_only=weights_only)
    )
    return {key: value for key, value in loaded.items() if key not in ("state_dict", "optimizer_states")}


def check_exists(path: Path) -> None:
    """Raise if a path leads to no checkpoint.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a folder that is no checkpoint is.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path} (seen from {Path.cwd()})")
    if path.is_dir() and not is_folder(path):
        raise ValueError(f"the folder {path} is no checkpoint: it has no .metadata and meta.pt")


def contents(folder: Folder, *, optimizers: bool) -> tuple[dict[Keys, Stored], list[Keys]]:
    """The tensors of a checkpoint, and the keys of its other values."""
    tops = folder.tops() if optimizers else ["model"]
    tensors = {(top, *keys): found for top in tops for keys, found in folder.tensors(top).items()}
    return tensors, [(top, *keys) for top in tops for keys in folder.objects(top)]


def names_of(folder: Folder) -> list[str]:
    """The names of the tensors in the plain model, in its order."""
    return [str(keys[0]) for keys in folder.tensors("model")]


def _load(file: Path, *, weights_only: bool) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only, mmap=is_zipfile(file))
    return loaded
