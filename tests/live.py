"""Memory of activations, by what is alive: it sees what saved-tensor hooks cannot, which do not nest."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Follows every storage that operations make within. peak: bytes alive, at most, when it was left."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sizes: dict[int, torch.Size] = {}
        self.peak = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.peak = max(self.peak, self.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in given:
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self._made.setdefault(reference.cdata, (reference, storage.nbytes()))
                self._sizes.setdefault(reference.cdata, leaf.shape)
        return output

    def nbytes(self) -> int:
        """Of all that are alive."""
        return sum(n for reference, n in self._made.values() if not reference.expired())

    def largest(self, shape: tuple[int, ...] = ()) -> int:
        """Elements of the largest tensor that made a storage that is alive, of those whose last dims are `shape`."""
        return max(
            (
                size.numel()
                for key, size in self._sizes.items()
                if not self._made[key][0].expired() and size[len(size) - len(shape) :] == shape
            ),
            default=0,
        )


def _key(tensor: torch.Tensor) -> int:
    number: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return number
