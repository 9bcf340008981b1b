"""Where a tensor-parallel shard lies in the whole tensor.

A sharded dim consists of sections (one, or several where projections are packed: gate and up; query, key and value).
Each section is cut as `torch.chunk` cuts, in units that stay together (a head), and a rank holds its piece of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ptdp.comm.collectives import chunk_sizes


@dataclass(frozen=True, slots=True)
class Piece:
    """A run along the sharded dim: elements `start` .. `start + length - 1` of the whole."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """How a tensor is cut.

    dim: the dim that is cut. sections: lengths along it, adding up to the whole. unit: elements that stay together.
    """

    dim: int
    sections: tuple[int, ...]
    unit: int = 1

    def pieces(self, rank: int, size: int) -> tuple[Piece, ...]:
        """What tensor rank `rank` of `size` holds, in the order of its local tensor."""
        pieces, start = [], 0
        for section in self.sections:
            lengths = [n * self.unit for n in chunk_sizes(section // self.unit, size)]
            pieces.append(Piece(start + sum(lengths[:rank]), lengths[rank]))
            start += section
        return tuple(pieces)

    def local_length(self, rank: int, size: int) -> int:
        """Length of the local tensor along the dim."""
        return sum(piece.length for piece in self.pieces(rank, size))

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The rank's local tensor, a copy."""
        runs = [whole.narrow(self.dim, piece.start, piece.length) for piece in self.pieces(rank, size)]
        return torch.cat(runs, self.dim).contiguous()

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """The whole tensor of the local ones of all ranks."""
        size = len(locals_)
        shape = list(locals_[0].shape)
        shape[self.dim] = sum(self.sections)
        whole = locals_[0].new_empty(shape)
        for rank, local in enumerate(locals_):
            pieces = self.pieces(rank, size)
            for piece, run in zip(pieces, local.split([p.length for p in pieces], self.dim), strict=True):
                whole.narrow(self.dim, piece.start, piece.length).copy_(run)
        return whole
