"""Compares the gradients of a split run with those of the whole one, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ptdp.check.runs import SplitRun, WholeRun
from lightning_ptdp.tensor_parallel.shard import Shard

_FLOOR = (
    1e-3  # of the largest gradient: what is far smaller is compared with this part of it, for it is mostly rounding
)


@dataclass(frozen=True)
class Comparison:
    """One parameter, split against whole.

    whole: its gradient, zeros where it has none. copies: what ranks hold in its stead, joined where tensor peers split
    it, by (pipeline rank, replica, tensor rank). difference: the largest. scale: that makes it relative.
    """

    whole: Tensor
    copies: dict[tuple[int, int, int], Tensor]
    difference: float
    scale: float

    @property
    def relative(self) -> float:
        """The difference by the scale; 0 where nothing differs."""
        if not self.difference:
            return 0.0
        return self.difference / self.scale if self.scale else math.inf


def compare(whole: WholeRun, split: SplitRun) -> dict[str, Comparison]:
    """Every trained parameter of the whole module, by name."""
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
    """What ranks hold of a gradient, zeros for none."""
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
    return float(gradient.abs().max()) if gradient is not None and gradient.numel() else 0.0
