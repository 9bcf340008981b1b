"""A module's forward, run again in backward from its inputs.

`torch.utils.checkpoint` does the work; around it, the second forward starts where the first did (`moments`).

With `recompute_every=k` each k blocks in a row are a group, of which only the first keeps its input:

    block 0 [keeps x0] -> x1 -> block 1 -> x2 -> block 2 ...

Block 1 finds that its input x1 is the very tensor that block 0 returned, and does not keep it. When backward reaches
block 1, it asks block 0 for x1, which runs block 0 again, and then runs itself again. If the caller did something to
x1 in between, it is another tensor, and block 1 keeps its own input.
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
    """What a block of a group returned in its first forward.

    Attributes:
        outputs: the tensors among it, each as a weak reference and the count of its edits.
        node: a `_SavingNode` that has saved them.
    """

    outputs: tuple[tuple[weakref.ref[Tensor], int], ...]
    node: Any

    def index(self, tensor: Tensor) -> int | None:
        """The number of the output that a tensor is, and is unedited; None if it is none of them."""
        return next((i for i, (ref, v) in enumerate(self.outputs) if ref() is tensor and version_of(tensor) == v), None)

    def values(self) -> tuple[Tensor, ...]:
        """The outputs again: to ask the node for what it has saved runs the block's second forward."""
        found: tuple[Tensor, ...] = self.node.saved_tensors
        return found


@dataclass
class Group:
    """Blocks that are called one after the other, of which only the first keeps its input.

    returned: what the block that was called last returned, if a next one of the group may take it.
    """

    returned: _Returned | None = None


@dataclass(frozen=True)
class Rerun:
    """Wraps the forward of one module, which then runs again in backward from its inputs.

    Attributes:
        beginnings: note what a forward starts from besides its inputs.
        group: the group of the block; a module within a block is a group of its own.
        is_first: whether it is the first of its group, which keeps its input.
        is_last: whether it is the last of its group, which hands its output to no other.
    """

    beginnings: Sequence[Beginning]
    group: Group = field(default_factory=Group)
    is_first: bool = True
    is_last: bool = True

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, and let backward run it again; without a graph, just run it."""
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
    """A forward with its arguments: runs on them the first time, and later on what was kept of them."""

    def __init__(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, before: _Returned | None, *, hands_on: bool
    ) -> None:
        """
        Args:
            forward: the module's own.
            args: its positional arguments.
            kwargs: its keyword arguments.
            before: what the block before it in its group returned; None for the first of a group.
            hands_on: whether the next block of its group may take its output for an input.

        returned: what the first call returned, as at most one entry, for the group.
        """
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
        """The leaves of the arguments that `checkpoint` is to keep, once; None for what the block before has."""
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
        """Put the arguments together again, from the kept leaves and from what the block before computes again."""
        leaves = list(kept)
        if any(source is not None for source in self._sources):
            assert self._before is not None, "the source of an input"
            values = self._before.values()
            for i, source in enumerate(self._sources):
                if source is not None:
                    leaves[i] = values[source].detach().requires_grad_(self._needs_gradient[i])
        return pytree.tree_unflatten(leaves, self._structure)


class _SavingNode(torch.autograd.Function):
    """A node of the graph that saves a block's outputs; what it returns is not used, so backward never reaches it.

    It is applied within the checkpointed forward, where what a node saves is not kept. To read its `saved_tensors`
    makes `checkpoint` run the forward again.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("no loss depends on it")


def _is_leaf(value: Any) -> bool:
    """Whether a value counts as one: all but plain containers do, since a forward may rely on their identity."""
    return type(value) not in (tuple, list, dict)
