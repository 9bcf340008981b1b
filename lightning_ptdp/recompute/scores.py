"""Attention scores, computed again in backward from the queries and keys, with no module run again.

    q, k -> product -> scale, mask, ... -> softmax -> dropout -> product with v
            |----------------- not kept, b a s s elements each -------|

`ScoreTape` watches the operations of a forward below autograd, where PyTorch's own functions are taken apart: from each
batched product on it notes what is done with the result. When what came through a softmax enters another product, the
operations in between are a *stretch*: tensors that autograd saved of it are let go, and computed again when backward
asks for the first of them. Linear layers, collectives and modules are not among those operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ptdp.generators import drawing_from, generators, states_of
from lightning_ptdp.host.torch import OpOverload, TorchDispatchMode, pytree, version_of
from lightning_ptdp.regions import Region, edited

_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that a stretch starts from, such as queries, keys or a mask, which is kept.

    version: its count of edits when it was read.
    """

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was edited in place since it was read.
        """
        if _version(self.tensor) != self.version:
            raise RuntimeError(
                "recompute='selective' computes attention scores again from queries, keys and masks, and one of "
                f"shape {tuple(self.tensor.shape)} was edited in place after the scores were computed; edit a copy, "
                "or use recompute='none'"
            )
        return self.tensor


class _SavedTensor:
    """Stands for a tensor that autograd saved: holds it, or the stretch that computes it again.

    view: where it lies among the storages of watched operations; None if it lies in none.
    """

    __slots__ = ("__weakref__", "_stretch", "_tensor", "_version", "view")

    def __init__(self, tensor: Tensor, view: Region[int] | None) -> None:
        self._tensor: Tensor | None = tensor
        self._version = version_of(tensor)
        self._stretch: Stretch | None = None
        self.view = view

    def let_go(self, stretch: Stretch) -> None:
        """Forget the tensor, which the stretch computes again, unless it was edited since it was saved."""
        if self._tensor is not None and version_of(self._tensor) == self._version:
            self._stretch, self._tensor = stretch, None

    def fill(self, tensor: Tensor) -> None:
        """Take the tensor that was computed again, until it is asked for."""
        self._tensor = tensor

    def is_of(self, stretch: Stretch) -> bool:
        """Whether this stretch computes it again."""
        return self._stretch is stretch

    def take(self) -> Tensor:
        """Return the tensor to autograd; if it was let go, all of its stretch is computed.

        Raises:
            RuntimeError: it was kept, and edited in place since. Autograd itself does not check tensors that hooks
                return.
        """
        if self._stretch is not None:
            if self._tensor is None:
                self._stretch.replay()
            tensor, self._tensor = self._tensor, None
            assert tensor is not None, "computed again"
            return tensor
        assert self._tensor is not None, "kept"
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that backward needs was modified by an inplace "
                f"operation: it is at version {version_of(self._tensor)}, and version {self._version} was saved"
            )
        return self._tensor


@dataclass(eq=False)
class _WatchedOperation:
    """A batched product, or an operation on what follows from one.

    Attributes:
        func: the operation.
        arguments: its arguments as a flat list, with a `_View` or a `_Kept` in the place of each tensor.
        structure: puts them together again.
        states: the generators that it draws from, and where they stood.
        reads: the watched operations that filled, last, what it reads; none for a product, at which stretches begin.
        comes_from_softmax: whether it is a softmax or follows from one.
        results: the tensors that it made, each by its number among the outputs and the identity of its storage.
        saved: what autograd saved of the storages that it filled.
        stretch: the one that computes it again, if any.
    """

    func: OpOverload
    arguments: list[Any]
    structure: pytree.TreeSpec
    states: list[tuple[torch.Generator, Tensor]]
    reads: list[_WatchedOperation]
    comes_from_softmax: bool
    results: list[tuple[int, int]] = field(default_factory=list)
    saved: list[weakref.ref[_SavedTensor]] = field(default_factory=list)
    stretch: Stretch | None = None

    def run(self, storages: dict[int, UntypedStorage]) -> None:
        """Run it again with the same draws, and add its results.

        Args:
            storages: those computed again so far, by the identity of their counterpart in the first forward.
        """
        leaves = [
            leaf.on(storages[leaf.storage])
            if isinstance(leaf, Region)
            else leaf.value()
            if isinstance(leaf, _Kept)
            else leaf
            for leaf in self.arguments
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        with drawing_from(self.states):
            outputs = pytree.tree_leaves(self.func(*args, **kwargs))
        storages.update((storage, outputs[i].untyped_storage()) for i, storage in self.results)


class Stretch:
    """The operations between two products: from that of queries and keys to what enters that with the values."""

    def __init__(self, operations: Sequence[_WatchedOperation]) -> None:
        """
        Args:
            operations: in the order in which they ran. Of each a copy is held, which keeps no other one alive.
        """
        self._operations = [
            _WatchedOperation(o.func, o.arguments, o.structure, o.states, [], False, o.results, o.saved)
            for o in operations
        ]

    def replay(self) -> None:
        """Run all operations again, and fill the tensors that were let go, if autograd still holds them."""
        storages: dict[int, UntypedStorage] = {}
        kept = next(leaf for o in self._operations for leaf in o.arguments if isinstance(leaf, _Kept))
        with torch.no_grad(), torch.autocast(kept.tensor.device.type, enabled=False):
            for operation in self._operations:
                operation.run(storages)
        for operation in self._operations:
            for reference in operation.saved:
                saved = reference()
                if saved is not None and saved.view is not None and saved.is_of(self):
                    saved.fill(saved.view.on(storages[saved.view.storage]))


class ScoreTape(TorchDispatchMode):
    """Watches the operations of one forward, and lets go of what is saved of attention scores.

    num_stretches: how many were found.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators(device)
        self._made: dict[int, _WatchedOperation] = {}
        self._pins: list[StorageWeakRef] = []
        self._order: list[_WatchedOperation] = []
        self.num_stretches = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, within the context, operations and what autograd saves."""
        with saved_tensors_hooks(self._pack, _SavedTensor.take), self:
            yield

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        """Take a tensor that autograd saves: from a stretch that is known already it is not kept."""
        storage = _storage(tensor) if self._made else 0
        operation = self._made.get(storage)
        if operation is None:
            return _SavedTensor(tensor, None)
        saved = _SavedTensor(tensor, Region.of(tensor, storage))
        operation.saved.append(weakref.ref(saved))
        if operation.stretch is not None:
            saved.let_go(operation.stretch)
        return saved

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_product = func in _PRODUCTS
        if not self._made and not is_product:
            return func(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors(args, kwargs)}
        reads = [self._made[storage] for storage in given if storage in self._made]
        if is_product and any(operation.comes_from_softmax for operation in reads):
            self._close([operation for operation in reads if operation.comes_from_softmax])
            return func(*args, **kwargs)
        if not is_product and not reads:
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        storages = [_storage(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        arguments = [
            leaf
            if not isinstance(leaf, Tensor)
            else Region.of(leaf, storage)
            if storage in self._made and not is_product
            else _Kept(leaf, _version(leaf))
            for leaf, storage in zip(leaves, storages, strict=True)
        ]
        states = self._states(func, leaves)
        comes = "softmax" in str(func) or func is torch.ops.aten.exp.default
        operation = _WatchedOperation(
            func,
            arguments,
            structure,
            states,
            [] if is_product else reads,
            comes or (not is_product and any(o.comes_from_softmax for o in reads)),
        )
        output = func(*args, **kwargs)
        self._note(operation, output, given, edited(func, args, kwargs))
        return output

    def _note(self, operation: _WatchedOperation, output: Any, given: set[int], written: Sequence[Tensor]) -> None:
        """Note an operation that has run by the storages that it filled.

        One that edits a storage which no watched operation filled is not noted, and so in no stretch.

        Args:
            operation: what ran.
            output: what it returned.
            given: identities of the storages of its arguments.
            written: the arguments that it edited.
        """
        changed = [_storage(tensor) for tensor in written]
        if any(storage not in self._made for storage in changed):
            return
        fresh = [
            (i, leaf)
            for i, leaf in enumerate(pytree.tree_leaves(output))
            if isinstance(leaf, Tensor) and _storage(leaf) not in given
        ]
        operation.results = [(i, _storage(leaf)) for i, leaf in fresh]
        self._pins += [StorageWeakRef(leaf.untyped_storage()) for _, leaf in fresh]
        filled = [*changed, *(storage for _, storage in operation.results)]
        if filled:
            self._made.update(dict.fromkeys(filled, operation))
            self._order.append(operation)

    def _close(self, ends: Sequence[_WatchedOperation]) -> None:
        """Make a stretch of these operations and all that they follow from, and let go of what is saved of it."""
        needed, waiting = set(ends), list(ends)
        while waiting:
            new = [operation for operation in waiting.pop().reads if operation not in needed]
            needed.update(new)
            waiting += new
        if all(operation.stretch is not None for operation in needed):
            return
        stretch = Stretch([operation for operation in self._order if operation in needed])
        self.num_stretches += 1
        for operation in needed:
            if operation.stretch is None:
                operation.stretch = stretch
                for reference in operation.saved:
                    saved = reference()
                    if saved is not None:
                        saved.let_go(stretch)

    def _states(self, func: OpOverload, leaves: Sequence[Any]) -> list[tuple[torch.Generator, Tensor]]:
        """The generators that an operation draws from, and where they stand; none if it draws nothing."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return []
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        return states_of(given or self._generators)


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, lists of them included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))


def _version(tensor: Tensor) -> int:
    """How often a tensor was edited in place; 0 for inference tensors, which keep no count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    number: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return number


@dataclass
class Scores:
    """Wraps the forward of one block, whose attention scores are then computed again in backward.

    Attributes:
        device: where the block computes.
        num_stretches: how many were found in its last forward with a graph; None before the first.
    """

    device: torch.device
    num_stretches: int | None = None

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, and let go of its attention scores; without a graph, just run it."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tape = ScoreTape(self.device)
        with tape.watching():
            output = forward(*args, **kwargs)
        self.num_stretches = tape.num_stretches
        return output
