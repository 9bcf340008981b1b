"""A whole checkpoint in one process, whatever its form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_ptdp.checkpoint.contents import plain_checkpoint
from lightning_ptdp.checkpoint.folder import Folder, Keys, is_folder
from lightning_ptdp.checkpoint.rectangles import Place, Placed


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
    if not where.exists():
        raise FileNotFoundError(f"there is no checkpoint {path} (seen from {Path.cwd()})")
    if where.is_file():
        loaded: dict[str, Any] = torch.load(where, map_location="cpu", weights_only=weights_only, mmap=True)
        if not optimizers:
            loaded.pop("optimizer_states", None)
        return loaded
    if not is_folder(where):
        raise ValueError(f"the folder {path} is no checkpoint: it has no .metadata and meta.pt")
    folder = Folder(where)
    tops = folder.tops() if optimizers else ["model"]
    tensors: dict[Keys, torch.Tensor] = {}
    objects: list[Keys] = []
    for top in tops:
        for keys, stored in folder.tensors(top).items():
            tensors[top, *keys] = torch.empty(stored.size, dtype=stored.dtype)
        objects += [(top, *keys) for keys in folder.objects(top)]
    placed: dict[Keys, Placed] = {keys: Place.whole(tuple(t.shape)).of(t) for keys, t in tensors.items()}
    found = folder.read(placed, objects)
    names = [str(keys[0]) for keys in folder.tensors("model")]
    return plain_checkpoint(folder.meta(weights_only=weights_only), names, {**tensors, **found})
