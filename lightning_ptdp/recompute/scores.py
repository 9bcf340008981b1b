"""Attention scores, computed again in backward from the queries and keys, with no module run again.

    q, k -> product -> scale, mask, ... -> softmax -> dropout -> product with v
            |----------------- not kept, b a s s elements each -------|

`ScoreTape` watches the operations of a forward below autograd, where PyTorch's own functions are taken apart: from each
batched product on it notes what is done with the result. When what came through a softmax enters another product, the
operations in between are a *span*: tensors that autograd saved of it are let go, and computed again when backward asks
for the first of them. Linear layers, collectives and modules are not among those operations.
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
    """A tensor that a span starts from."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was edited since.
        """
        if _version(self.tensor) != self.version:
            raise RuntimeError(
                "recompute='selective' computes attention scores again from queries, keys and masks, and one of "
                f"shape {tuple(self.tensor.shape)} was edited in place after the scores were computed; edit a copy, "
                "or use recompute='none'"
            )
        return self.tensor


class _Saved:
    """A tensor that autograd saved, or where to compute it again."""

    __slots__ = ("__weakref__", "_span", "_tensor", "_version", "view")

    def __init__(self, tensor: Tensor, view: Region[int] | None) -> None:
        self._tensor: Tensor | None = tensor
        self._version = version_of(tensor)
        self._span: Span | None = None
        self.view = view

    def let_go(self, span: Span) -> None:
        """Forget the tensor, unless it was edited since."""
        if self._tensor is not None and version_of(self._tensor) == self._version:
            self._span, self._tensor = span, None

    def fill(self, tensor: Tensor) -> None:
        """Take the tensor that was computed again, until it is asked for."""
        self._tensor = tensor

    def is_of(self, span: Span) -> bool:
        """Whether the span is to compute it."""
        return self._span is span

    def take(self) -> Tensor:
        """The tensor, for autograd.

        Raises:
            RuntimeError: it was edited in place since; autograd itself does not look where hooks are.
        """
        if self._span is not None:
            if self._tensor is None:
                self._span.replay()
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
class _Operation:
    """One operation on what follows from a product. reads: storages, each with the operation that filled it last."""

    func: OpOverload
    arguments: list[Any]
    structure: pytree.TreeSpec
    states: list[tuple[torch.Generator, Tensor]]
    reads: list[_Operation]
    comes_from_softmax: bool
    results: list[tuple[int, int]] = field(default_factory=list)
    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    span: Span | None = None

    def run(self, storages: dict[int, UntypedStorage]) -> None:
        """Compute it on other storages, with the same draws."""
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


class Span:
    """The operations behind what enters a product with values, in order."""

    def __init__(self, operations: Sequence[_Operation]) -> None:
        self._operations = [
            _Operation(o.func, o.arguments, o.structure, o.states, [], False, o.results, o.saved) for o in operations
        ]

    def replay(self) -> None:
        """Compute all that was let go and that backward has not dropped."""
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
    """Watches one forward. num_spans: how many were found."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators(device)
        self._made: dict[int, _Operation] = {}
        self._pins: list[StorageWeakRef] = []
        self._order: list[_Operation] = []
        self.num_spans = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, operations are watched, and what autograd saves."""
        with saved_tensors_hooks(self._pack, _Saved.take), self:
            yield

    def _pack(self, tensor: Tensor) -> _Saved:
        storage = _storage(tensor) if self._made else 0
        operation = self._made.get(storage)
        if operation is None:
            return _Saved(tensor, None)
        saved = _Saved(tensor, Region.of(tensor, storage))
        operation.saved.append(weakref.ref(saved))
        if operation.span is not None:
            saved.let_go(operation.span)
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
        operation = _Operation(
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

    def _note(self, operation: _Operation, output: Any, given: set[int], written: Sequence[Tensor]) -> None:
        """Take an operation down by the storages that it filled; one that edits anything else is in no span."""
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

    def _close(self, ends: Sequence[_Operation]) -> None:
        """Let go of what was saved of the operations behind these."""
        needed, waiting = set(ends), list(ends)
        while waiting:
            new = [operation for operation in waiting.pop().reads if operation not in needed]
            needed.update(new)
            waiting += new
        if all(operation.span is not None for operation in needed):
            return
        span = Span([operation for operation in self._order if operation in needed])
        self.num_spans += 1
        for operation in needed:
            if operation.span is None:
                operation.span = span
                for reference in operation.saved:
                    saved = reference()
                    if saved is not None:
                        saved.let_go(span)

    def _states(self, func: OpOverload, leaves: Sequence[Any]) -> list[tuple[torch.Generator, Tensor]]:
        """Where the generators stand that an operation draws from."""
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
    """How often it was edited; tensors of inference do not count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _storage(tensor: Tensor) -> int:
    number: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return number


Forward = Callable[..., Any]


@dataclass
class Scores:
    """Recomputes the attention scores of one module. num_spans: of its last forward with a graph; None before."""

    device: torch.device
    num_spans: int | None = None

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, and let go of scores."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tape = ScoreTape(self.device)
        with tape.watching():
            output = forward(*args, **kwargs)
        self.num_spans = tape.num_spans
        return output
