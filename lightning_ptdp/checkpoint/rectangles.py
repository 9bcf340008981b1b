"""Where what a rank holds lies in the whole tensor, as rectangles.

A tensor-parallel shard may be several runs along a dim (packed projections), and a shard of a sharded optimizer is a
run of the flattened local tensor. Both are a few boxes, each with its offset in the whole and a view of local memory,
which is all that a checkpoint needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_ptdp.tensor_parallel.shard import Shard

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box of the whole tensor. offset: of its first element, a number for each dim. view: of local memory."""

    offset: Size
    view: Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """What a rank holds of a tensor.

    size: of the whole. rectangles: disjoint; none where the rank holds nothing. is_shared: whether tensor peers and
    replicas hold the same, else only replicas do. is_alone: whether no other rank holds it.
    """

    size: Size
    rectangles: tuple[Rectangle, ...]
    is_shared: bool = True
    is_alone: bool = False

    def copied(self) -> Placed:
        """The same, in host memory of its own."""
        copies = tuple(replace(r, view=r.view.detach().to("cpu", copy=True).contiguous()) for r in self.rectangles)
        return replace(self, rectangles=copies)

    def take(self, whole: Tensor) -> None:
        """Copy from the whole tensor what the rank holds of it."""
        for rectangle in self.rectangles:
            rectangle.view.copy_(part(whole, rectangle.offset, tuple(rectangle.view.shape)))


@dataclass(frozen=True, slots=True)
class _Box:
    """The same box in the whole tensor and in the local one. offset, local: of its first element."""

    offset: Size
    local: Size
    extent: Size


@dataclass(frozen=True, slots=True)
class Place:
    """Where a local tensor lies in the whole. size: of the whole. shape: of the local tensor."""

    size: Size
    shape: Size
    boxes: tuple[_Box, ...]
    is_shared: bool

    @classmethod
    def whole(cls, size: Size) -> Place:
        """Of a tensor that the rank holds whole."""
        return cls(size, size, (_Box((0,) * len(size), (0,) * len(size), size),), is_shared=True)

    @classmethod
    def sharded(cls, shape: Size, shard: Shard, rank: int, size: int) -> Place:
        """Of the local tensor, of `shape`, of tensor rank `rank` of `size`."""
        boxes, start = [], 0
        for piece in shard.pieces(rank, size):
            if piece.length:
                offset, local, extent = [0] * len(shape), [0] * len(shape), list(shape)
                offset[shard.dim], local[shard.dim], extent[shard.dim] = piece.start, start, piece.length
                boxes.append(_Box(tuple(offset), tuple(local), tuple(extent)))
            start += piece.length
        whole = list(shape)
        whole[shard.dim] = sum(shard.sections)
        return cls(tuple(whole), shape, tuple(boxes), is_shared=False)

    def of(self, local: Tensor) -> Placed:
        """The whole local tensor."""
        found = tuple(Rectangle(box.offset, part(local, box.local, box.extent)) for box in self.boxes)
        return Placed(self.size, found, is_shared=self.is_shared)

    def of_run(self, run: Tensor, start: int) -> Placed:
        """Elements `start` .. `start + len(run) - 1` of the flattened local tensor, which no other rank holds."""
        found, taken = [], 0
        for corner, extent in _boxes_of_run(self.shape, start, start + run.numel()):
            values = run[taken : taken + math.prod(extent)].view(extent)
            taken += values.numel()
            for box in self.boxes:
                low = tuple(map(max, corner, box.local))
                high = tuple(
                    min(c + n, b + k) for c, n, b, k in zip(corner, extent, box.local, box.extent, strict=True)
                )
                if all(a < b for a, b in zip(low, high, strict=True)):
                    view = part(values, _minus(low, corner), _minus(high, low))
                    found.append(Rectangle(_plus(box.offset, _minus(low, box.local)), view))
        return Placed(self.size, tuple(found), is_shared=False, is_alone=True)


def _boxes_of_run(shape: Size, start: int, stop: int) -> Iterator[tuple[Size, Size]]:
    """Corner and extent of the fewest boxes that make up a run of the flattened tensor, in its order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows that are complete
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner if start < first * inner else 0)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(shape: Size, row: int, start: int, stop: int) -> Iterator[tuple[Size, Size]]:
    for corner, extent in _boxes_of_run(shape[1:], start, stop):
        yield (row, *corner), (1, *extent)


def part(tensor: Tensor, corner: Size, extent: Size) -> Tensor:
    """A view of a box of a tensor."""
    for dim, (start, length) in enumerate(zip(corner, extent, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _plus(a: Size, b: Size) -> Size:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Size, b: Size) -> Size:
    return tuple(x - y for x, y in zip(a, b, strict=True))
