"""A log of what was done to tensors that hold no values, from which the values of any one of them can be computed.

Tensors live on the meta device, and are told apart by their storages: an operation is logged with the regions of
storages that it reads and writes. So views need no entries, and a parameter needs none besides the tensor that it was
made of. To compute one tensor, the operations that its storage depends on are run in their order:

    a.normal_()    b.zero_()    a.mul_(b)    a.uniform_()    c = a + 1

The value of c takes two of these, the last ones. What comes before a write of the whole storage does not matter: a
default initialisation that another one replaces is not run.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ptdp.generators import kept
from lightning_ptdp.host.torch import pytree
from lightning_ptdp.regions import Region

StorageRegion = Region[StorageWeakRef]


def region_of(tensor: Tensor) -> StorageRegion:
    """Where a tensor lies.

    Raises:
        ValueError: the tensor is a conjugate or a negative that was put off.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is a view of another's conjugate, which init='by_operation' "
            "does not follow; keep tensor.resolve_conj().resolve_neg()"
        )
    return Region.of(tensor, StorageWeakRef(tensor.untyped_storage()))


@dataclass(frozen=True)
class Setting:
    """What an operation depends on besides its arguments.

    Attributes:
        default_dtype: PyTorch's at the time of the call.
        seed: of its random numbers; None if it draws none.
    """

    default_dtype: torch.dtype
    seed: int | None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Put the setting in force within the context; afterwards all is as it was."""
        dtype = torch.get_default_dtype()
        with kept((torch.default_generator,) if self.seed is not None else ()):
            torch.set_default_dtype(self.default_dtype)
            if self.seed is not None:
                torch.default_generator.manual_seed(self.seed)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class Operation:
    """An entry of the log: a call of a function that was put off.

    Attributes:
        function: what was called.
        args: its arguments, each tensor replaced by its region.
        kwargs: its keyword arguments, likewise.
        setting: the default dtype then, and the seed.
        reads: storages whose former values matter to it.
        writes: storages that it changes or makes.
        outputs: for each leaf of what it returns the region of the new tensor; None if it is none.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    setting: Setting
    reads: frozenset[StorageWeakRef]
    writes: frozenset[StorageWeakRef]
    outputs: tuple[StorageRegion | None, ...]

    @property
    def name(self) -> str:
        """The function's name, which is the same in every process."""
        is_python = isinstance(self.function, FunctionType)
        return self.function.__qualname__ if is_python else str(self.function)


class _Memory:
    """The storages of one computation, which have values."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._storages: dict[StorageWeakRef, UntypedStorage] = {}

    def storage(self, key: StorageWeakRef) -> UntypedStorage:
        """Look up a storage, or make it with the values that it had before any operation of the log."""
        found = self._storages.get(key)
        if found is None:
            found = self._storages[key] = self._log.initial(key)
        return found

    def run(self, operation: Operation) -> None:
        """Run an operation of the log on these storages."""
        args, kwargs = pytree.tree_map_only(
            Region, lambda region: region.on(self.storage(region.storage)), (operation.args, operation.kwargs)
        )
        with operation.setting():
            leaves = pytree.tree_leaves(operation.function(*args, **kwargs))
        for region, leaf in zip(operation.outputs, leaves, strict=True):
            if region is None:
                continue
            same = leaf.stride() == region.stride and leaf.storage_offset() == region.offset
            if same and leaf.untyped_storage().nbytes() == self._log.num_bytes(region.storage):
                self._storages[region.storage] = leaf.untyped_storage()
            else:
                region.on(self.storage(region.storage)).copy_(leaf)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A storage that the log knows.

    Attributes:
        number: in the order of entry.
        num_bytes: its size.
        value: what it held when it was entered; None for zeros.
    """

    number: int
    num_bytes: int
    value: Tensor | None


class Log:
    """The operations that were put off, in their order, and the storages that they work on."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._storages: dict[StorageWeakRef, _Entry] = {}
        self._writers: dict[StorageWeakRef, list[int]] = {}  # indices of operations, ascending
        self._hash = hashlib.blake2b(digest_size=8)

    @property
    def digest(self) -> str:
        """A hash of the operations, their arguments, and the values that were entered."""
        return self._hash.hexdigest()

    @property
    def constant_bytes(self) -> int:
        """Bytes of the values that the log has to hold because they are not results of its operations."""
        return sum(entry.num_bytes for entry in self._storages.values() if entry.value is not None)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the log can compute a tensor's values."""
        return tensor.is_meta and StorageWeakRef(tensor.untyped_storage()) in self._storages

    def allocate(self, tensor: Tensor, value: Tensor | None = None) -> None:
        """Enter the storage of a tensor on the meta device.

        Args:
            tensor: fills its storage if it has a value.
            value: what it holds, contiguous; None for zeros.
        """
        key, size = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self._storages[key] = _Entry(len(self._storages), size, value)
        if value is not None:
            self._hash.update(f"{value.dtype}{list(value.shape)}".encode())
            self._hash.update(value.reshape(-1).view(torch.uint8).numpy().data)

    def add(self, operation: Operation) -> None:
        """Append an operation; all its storages have been entered."""
        index = len(self._operations)
        self._operations.append(operation)
        for key in operation.writes:
            self._writers.setdefault(key, []).append(index)
        leaves = pytree.tree_leaves((operation.args, operation.kwargs))
        self._hash.update(f"{operation.name}{[self._in_words(leaf) for leaf in leaves]}".encode())

    def value(self, region: StorageRegion) -> Tensor:
        """Compute the values of a region.

        Returns:
            The region of a new storage, which is as large as the region's own.
        """
        memory = _Memory(self)
        with torch.no_grad():
            for index in self._history(region.storage):
                memory.run(self._operations[index])
            return region.on(memory.storage(region.storage))

    def num_bytes(self, key: StorageWeakRef) -> int:
        """Bytes of a storage."""
        return self._storages[key].num_bytes

    def initial(self, key: StorageWeakRef) -> UntypedStorage:
        """Make a storage with the values that it had before the first operation on it."""
        entry = self._storages[key]
        if entry.value is not None:
            return entry.value.clone().untyped_storage()
        return torch.zeros(entry.num_bytes, dtype=torch.uint8).untyped_storage()

    def _history(self, key: StorageWeakRef) -> list[int]:
        """Find the operations that a storage's last values depend on, as ascending indices.

        From the last writer of the storage it goes back to the last writers, before that one, of all that it reads.
        """
        needed: set[int] = set()
        ends = [(key, len(self._operations))]
        while ends:
            storage, before = ends.pop()
            writers = self._writers.get(storage, [])
            i = bisect_left(writers, before)
            if i > 0 and writers[i - 1] not in needed:
                needed.add(writers[i - 1])
                ends += [(read, writers[i - 1]) for read in self._operations[writers[i - 1]].reads]
        return sorted(needed)

    def _in_words(self, leaf: Any) -> str:
        """Write an argument for the digest, with numbers for storages: their keys differ from process to process."""
        if not isinstance(leaf, Region):
            return repr(leaf)
        return f"{self._storages[leaf.storage].number}{leaf.dtype}{leaf.shape}{leaf.stride}{leaf.offset}"
