"""A module's forward, run again in backward from its inputs.

`torch.utils.checkpoint` does the work; around it, the second forward starts where the first did (`moments`). Of blocks
in a group only the first keeps its input:

    block 0 [keeps x0] -> x1 -> block 1 -> x2 -> block 2 ...

Block 1 knows that its input is what block 0 returned, the same tensor, and has it computed again: to unpack what block
0 would have saved runs block 0. Where the caller did something to x1 in between, block 1 keeps its own input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.host.torch import pytree, version_of
from lightning_ptdp.recompute.moments import Beginning, FirstForward, SecondForward


@dataclass(frozen=True)
class _Returned:
    """What a block of a group returned. outputs: its tensors. node: of the graph, saves them; see `_SavingNode`."""

    outputs: tuple[tuple[weakref.ref[Tensor], int], ...]
    node: Any

    def index(self, tensor: Tensor) -> int | None:
        """Which of the outputs a tensor is, unchanged; None if it is none."""
        return next((i for i, (ref, v) in enumerate(self.outputs) if ref() is tensor and version_of(tensor) == v), None)

    def values(self) -> tuple[Tensor, ...]:
        """The outputs again: asking for what is saved runs the block's second forward."""
        found: tuple[Tensor, ...] = self.node.saved_tensors
        return found


@dataclass
class Group:
    """Blocks that are called one after the other, of which only the first keeps its input."""

    returned: _Returned | None = None


@dataclass(frozen=True)
class Rerun:
    """Recomputes one module. beginnings: of what it starts from. group: of its block."""

    beginnings: Sequence[Beginning]
    group: Group = field(default_factory=Group)
    is_first: bool = True
    is_last: bool = True

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, and again in backward."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = None if self.is_first else self.group.returned
        self.group.returned = None
        call = _RepeatedCall(forward, args, kwargs, before, hands_on=not self.is_last)
        moments = [begin() for begin in self.beginnings]
        output = checkpoint(
            call,
            *call.take_kept(),
            use_reentrant=False,
            preserve_rng_state=False,  # `moments` do, of all generators
            context_fn=lambda: (FirstForward(moments), SecondForward(moments)),
        )
        self.group.returned = call.returned.pop() if call.returned else None
        return output


class _RepeatedCall:
    """A forward with its arguments, which runs first on these, and then on what was kept of them."""

    def __init__(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, before: _Returned | None, *, hands_on: bool
    ) -> None:
        self._forward, self._before, self._hands_on = forward, before, hands_on
        self._given = [(args, kwargs)]
        leaves, self._structure = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
        self._sources = [
            before.index(leaf) if before is not None and isinstance(leaf, Tensor) else None for leaf in leaves
        ]
        self._needs_gradient = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self._kept = [leaf if source is None else None for leaf, source in zip(leaves, self._sources, strict=True)]
        self.returned: list[_Returned] = []

    def take_kept(self) -> list[Any]:
        """What the second forward is to be given."""
        kept, self._kept = self._kept, []
        return kept

    def __call__(self, *kept: Any) -> Any:
        is_first = bool(self._given)
        args, kwargs = self._given.pop() if is_first else self._arguments(kept)
        output = self._forward(*args, **kwargs)
        if self._hands_on:
            tensors = tuple(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
            node = _SavingNode.apply(*tensors).grad_fn  # type: ignore[no-untyped-call]
            if is_first and node is not None:
                self.returned.append(_Returned(tuple((weakref.ref(t), version_of(t)) for t in tensors), node))
        return output

    def _arguments(self, kept: Sequence[Any]) -> Any:
        leaves = list(kept)
        if any(source is not None for source in self._sources):
            assert self._before is not None, "the source of an input"
            values = self._before.values()
            for i, source in enumerate(self._sources):
                if source is not None:
                    leaves[i] = values[source].detach().requires_grad_(self._needs_gradient[i])
        return pytree.tree_unflatten(leaves, self._structure)


class _SavingNode(torch.autograd.Function):
    """A node beside the graph that saves tensors; what it returns is not used."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("no loss depends on it")


def _is_leaf(value: Any) -> bool:
    """Only plain containers are looked into: others have an identity that a forward may rely on."""
    return type(value) not in (tuple, list, dict)
