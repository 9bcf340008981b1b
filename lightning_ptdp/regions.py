"""Describes tensors by where they lie, so that another storage can stand in for their own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage

from lightning_ptdp.host.torch import OpOverload, pytree, schema_of

StorageKey = TypeVar("StorageKey", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Region(Generic[StorageKey]):
    """A strided part of a storage.

    Attributes:
        storage: tells storages apart, and keeps none of them alive.
        dtype: of its elements.
        shape: sizes of its dims.
        stride: of its dims, in elements.
        offset: of its first element in the storage, in elements.
    """

    storage: StorageKey
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, storage: StorageKey) -> Region[StorageKey]:
        """Describe where a tensor lies; `storage` is whatever the caller tells storages apart by."""
        return cls(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: UntypedStorage) -> Tensor:
        """Make a tensor of the same region of another storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def edited(func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the tensors among an operation's arguments that it edits in place, those in lists too."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    values = [
        args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
