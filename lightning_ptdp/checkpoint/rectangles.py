"""Where what a rank holds lies in the whole tensor, as rectangles.

A tensor-parallel shard may be several runs along a dim (packed projections), and a shard of a sharded optimizer is a
piece of the flattened local tensor. Both are a few boxes, each with its offset in the whole and a view of local memory,
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
    """A box of the whole tensor. offset: index of its first element there. view: its values, in local memory."""

    offset: Size
    view: Tensor


@dataclass(frozen=True, slots=True)
class Located:
    """What a rank holds of a tensor.

    size: shape of the whole. rectangles: disjoint; none where the rank holds nothing. on_tensor_peers, on_replicas:
    whether those ranks hold the same.
    """

    size: Size
    rectangles: tuple[Rectangle, ...]
    on_tensor_peers: bool = True
    on_replicas: bool = True

    def copied(self) -> Located:
        """The same, in host memory of its own."""
        copies = tuple(replace(r, view=r.view.detach().to("cpu", copy=True).contiguous()) for r in self.rectangles)
        return replace(self, rectangles=copies)

    def take(self, whole: Tensor) -> None:
        """Copy from the whole tensor what the rank holds of it."""
        for rectangle in self.rectangles:
            rectangle.view.copy_(part(whole, rectangle.offset, tuple(rectangle.view.shape)))


@dataclass(frozen=True, slots=True)
class _Box:
    """A box in the whole tensor and in the local one. offset, local: index of its first element in each."""

    offset: Size
    local: Size
    extent: Size


@dataclass(frozen=True, slots=True)
class Location:
    """Where a local tensor lies in the whole. size: shape of the whole. shape: that of the local tensor."""

    size: Size
    shape: Size
    boxes: tuple[_Box, ...]
    on_tensor_peers: bool

    @classmethod
    def whole(cls, size: Size) -> Location:
        """The location of a tensor that the rank holds whole."""
        return cls(size, size, (_Box((0,) * len(size), (0,) * len(size), size),), on_tensor_peers=True)

    @classmethod
    def sharded(cls, shape: Size, shard: Shard, rank: int, size: int) -> Location:
        """The location of a local tensor of `shape`, on tensor rank `rank` of `size`."""
        boxes, start = [], 0
        for piece in shard.pieces(rank, size):
            if piece.length:
                offset, local, extent = [0] * len(shape), [0] * len(shape), list(shape)
                offset[shard.dim], local[shard.dim], extent[shard.dim] = piece.start, start, piece.length
                boxes.append(_Box(tuple(offset), tuple(local), tuple(extent)))
            start += piece.length
        whole = list(shape)
        whole[shard.dim] = sum(shard.sections)
        return cls(tuple(whole), shape, tuple(boxes), on_tensor_peers=False)

    def of(self, local: Tensor) -> Located:
        """Locate a local tensor."""
        found = tuple(Rectangle(box.offset, part(local, box.local, box.extent)) for box in self.boxes)
        return Located(self.size, found, self.on_tensor_peers)

    def piece(self, start: int, length: int) -> FlatLocation:
        """The location of the elements `start` .. `start + length - 1` of the flattened local tensor."""
        return FlatLocation(self, start, length)


@dataclass(frozen=True, slots=True)
class FlatLocation:
    """Where a piece of a flattened local tensor lies in the whole; no other replica holds it."""

    location: Location
    start: int
    length: int

    @property
    def size(self) -> Size:
        """The shape of the whole."""
        return self.location.size

    @property
    def shape(self) -> Size:
        """The shape of the piece: its length."""
        return (self.length,)

    def of(self, piece: Tensor) -> Located:
        """Locate the elements of this piece."""
        found, taken = [], 0
        for corner, extent in _boxes_of_run(self.location.shape, self.start, self.start + self.length):
            values = piece[taken : taken + math.prod(extent)].view(extent)
            taken += values.numel()
            for box in self.location.boxes:
                low = tuple(map(max, corner, box.local))
                high = tuple(map(min, _plus(corner, extent), _plus(box.local, box.extent)))
                if all(a < b for a, b in zip(low, high, strict=True)):
                    view = part(values, _minus(low, corner), _minus(high, low))
                    found.append(Rectangle(_plus(box.offset, _minus(low, box.local)), view))
        return Located(self.size, tuple(found), self.location.on_tensor_peers, on_replicas=False)


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
