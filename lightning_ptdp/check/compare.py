"""Compares the gradients of a split run with those of the whole one, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ptdp.check.runs import SplitRun, WholeRun
from lightning_ptdp.tensor_parallel.shard import Shard

# A gradient far smaller than the largest of the module is mostly rounding: its difference counts relative to this part
# of the largest one.
_FLOOR = 1e-3


@dataclass(frozen=True)
class Comparison:
    """The gradient of one parameter in a split run, compared with that of the whole run.

    Attributes:
        whole: the gradient of the whole run; a zero if it has none.
        copies: the gradients of the split run by (pipeline rank, replica, tensor rank): one for each rank that holds
            the parameter, or one for all tensor peers that split it, joined.
        difference: the largest of any element of any copy.
        scale: what the difference is divided by to make it relative.
    """

    whole: Tensor
    copies: dict[tuple[int, int, int], Tensor]
    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """The difference divided by the scale; 0 if nothing differs."""
        if not self.difference:
            return 0.0
        return self.difference / self.scale if self.scale else math.inf


def compare(whole: WholeRun, split: SplitRun) -> dict[str, Comparison]:
    """Compare the gradients of all trained parameters, by the names of the whole module."""
    sizes = {name: _size(gradient) for name, gradient in whole.gradients.items()}
    floor = _FLOOR * max(sizes.values(), default=0.0)
    return {name: _compare(whole, split, name, max(size, floor)) for name, size in sizes.items()}


def _compare(whole: WholeRun, split: SplitRun, name: str, scale: float) -> Comparison:
    copies = dict(_copies(split, name))
    gradient = whole.gradients[name]
    reference = gradient if gradient is not None else torch.zeros(())
    differences = [float((copy - reference).abs().max()) if copy.numel() else 0.0 for copy in copies.values()]
    worst = max(differences, key=lambda d: (math.isnan(d), d), default=_size(gradient))
    return Comparison(reference, copies, worst, scale)


def _copies(split: SplitRun, name: str) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
    """What ranks hold of a gradient, as `Comparison.copies`; a zero for a rank that has none."""
    held: dict[tuple[int, int], dict[int, Tensor | None]] = {}
    for part in split.parts:
        if name in part.gradients:
            held.setdefault((part.at.pipeline, part.at.data), {})[part.at.tensor] = part.gradients[name]
    shard = split.layout.placement.shards.get(name)
    for at, by_peer in held.items():
        tensors = [by_peer[peer] for peer in sorted(by_peer)]
        if shard is None:
            for peer, tensor in enumerate(tensors):
                yield (*at, peer), torch.zeros(()) if tensor is None else tensor
        elif all(tensor is None for tensor in tensors):
            yield (*at, 0), torch.zeros(())
        else:
            yield (*at, 0), shard.join(_with_zeros(tensors, shard))


def _with_zeros(tensors: list[Tensor | None], shard: Shard) -> list[Tensor]:
    """The shards of all peers, zeros for those without a gradient."""
    given = next(tensor for tensor in tensors if tensor is not None)
    shapes = [list(given.shape) for _ in tensors]
    for peer, shape in enumerate(shapes):
        shape[shard.dim] = shard.local_length(peer, len(tensors))
    return [given.new_zeros(shape) if t is None else t for t, shape in zip(tensors, shapes, strict=True)]


def _size(gradient: Tensor | None) -> float:
    """The largest magnitude of an element."""
    return float(gradient.abs().max()) if gradient is not None and gradient.numel() else 0.0
