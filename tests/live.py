"""Memory of activations, by what is alive: it sees what saved-tensor hooks cannot, which do not nest."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Follows every storage that operations make within."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self._made.setdefault(reference.cdata, (reference, storage.nbytes()))
        return output

    def nbytes(self, *, without: Iterable[torch.Tensor] = ()) -> int:
        """Of all that are alive, but for the storages of some tensors."""
        left_out = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in without}
        return sum(n for key, (reference, n) in self._made.items() if not reference.expired() and key not in left_out)
