"""Cuts a replica's batch into microbatches along dim 0, whatever structure it has."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of a batch that goes through the pipeline at once.

    index: its place in the batch. batch: of the batch's own structure. num_samples: its rows.
    """

    index: int
    batch: Any
    num_samples: int

    def signature(self) -> Hashable:
        """Shapes and dtypes of its tensors, which fix the shapes of all activations."""
        return tuple((path, tuple(leaf.shape), leaf.dtype) for path, leaf in _tensors(self.batch, ""))

    def copy(self) -> Microbatch:
        """The same with containers and tensors of its own, which a step may change in place."""
        return dataclasses.replace(self, batch=_map(self.batch, _copied))


def digest(batch: Any) -> str:
    """A short text that differs where the values of batches do."""
    found = hashlib.blake2b(digest_size=8)
    for path, leaf in _tensors(batch, ""):
        found.update(f"{path}{tuple(leaf.shape)}{leaf.dtype}".encode())
        found.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if leaf.ndim else b"")
    return found.hexdigest()


def num_samples(batch: Any) -> int:
    """Rows of a batch: the leading size that most of its tensors share (sizes of 1 only if there is no other).

    1 for a batch without tensors.
    """
    sizes = Counter(len(leaf) for _, leaf in _tensors(batch, "") if leaf.ndim)
    if not sizes:
        return 1
    return max(sizes, key=lambda size: (size != 1, sizes[size]))


def split(batch: Any, size: int) -> list[Microbatch]:
    """Cut a batch into microbatches of `size` rows; the last may be smaller, and an empty batch gives none.

    Tensors are cut along dim 0, and so are lists of as many strings or numbers as there are rows. Tensors without dims
    or with a leading size of 1 belong to every row, and any other leaf is passed on.

    Raises:
        ValueError: a tensor has neither the batch's leading size nor 1.
    """
    total = num_samples(batch)
    if total <= size:
        return [Microbatch(0, batch, total)] if total else []
    odd = {path: tuple(leaf.shape) for path, leaf in _tensors(batch, "") if leaf.ndim and len(leaf) not in (1, total)}
    if odd:
        raise ValueError(
            f"a batch is cut along dim 0 into microbatches of {size}; most of its tensors have {total} rows, but "
            f"{odd} do not; give every tensor the batch's leading size (or 1, or no dims), or set "
            f"micro_batch_size={total}"
        )
    starts = range(0, total, size)
    return [
        Microbatch(k, _cut(batch, start, min(start + size, total), total), min(size, total - start))
        for k, start in enumerate(starts)
    ]


def replica_batches(batch: Any, num_replicas: int) -> list[Any]:
    """A global batch as the batches of replicas: runs of rows, the first ones longer by a row where it is uneven."""
    total = num_samples(batch)
    short, longer = divmod(total, num_replicas)
    bounds = [k * short + min(k, longer) for k in range(num_replicas + 1)]
    return [_cut(batch, start, stop, total) for start, stop in pairwise(bounds)]


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with a function applied to every tensor."""
    return _map(batch, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def _cut(batch: Any, start: int, stop: int, total: int) -> Any:
    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == total:
            return leaf[start:stop]
        if isinstance(leaf, list | tuple) and len(leaf) == total:
            return leaf[start:stop]
        return leaf

    return _map(batch, cut)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves: tensors, plain lists of scalars, and whatever is no container."""
    if isinstance(value, Mapping):
        mapped = {key: _map(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
    if isinstance(value, list | tuple) and not _is_plain(value):
        items = [_map(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _map(getattr(value, f.name), function) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    return function(value)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return type(leaf)(leaf) if type(leaf) in (list, tuple) else leaf


def _is_plain(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list holds strings and numbers only, as a collated column does."""
    return all(isinstance(item, str | bytes | int | float) for item in value) and not hasattr(value, "_fields")


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with where it stands, such as ``['labels'][0]``."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _tensors(getattr(value, f.name), f"{path}.{f.name}")
