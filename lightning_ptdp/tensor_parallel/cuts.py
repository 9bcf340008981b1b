"""The ways in which a style cuts a parameter of its module: each takes what is to be cut and returns the `Shard`.

None says that the parameter stays whole on every peer, as the bias of a row-parallel layer does. A cut that leaves a
peer without a part, or tears apart what belongs together, is a `ValueError` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ptdp.tensor_parallel.shard import Shard


@dataclass(frozen=True)
class Uncut:
    """A parameter that is to be cut.

    name: its dotted name, for messages. shape: of the whole. is_transposed: whether a linear layer keeps it as
    [in, out]. size: number of tensor peers.
    """

    name: str
    shape: tuple[int, ...]
    is_transposed: bool
    size: int

    @property
    def is_vector(self) -> bool:
        """Whether it is a bias, say, which has an output dim alone."""
        return len(self.shape) == 1

    @property
    def out_dim(self) -> int:
        """The dim of outputs; dims before the last two count experts, say."""
        return len(self.shape) - (1 if self.is_vector or self.is_transposed else 2)

    @property
    def in_dim(self) -> int:
        """The dim of inputs."""
        return len(self.shape) - (2 if self.is_transposed else 1)


Cut = Callable[[Uncut], Shard | None]


def stays_whole(_: Uncut) -> None:
    """Every peer has the whole."""


def by_output(uncut: Uncut) -> Shard:
    """Each peer has a part of the outputs."""
    return _along(uncut, uncut.out_dim)


def by_input(uncut: Uncut) -> Shard | None:
    """Each peer has a part of the inputs; a bias stays whole."""
    return None if uncut.is_vector else _along(uncut, uncut.in_dim)


def by_output_of_halves(uncut: Uncut) -> Shard:
    """Each peer has a part of the outputs of each of two matrices that are kept as one."""
    return _along(uncut, uncut.out_dim, _halves(uncut, uncut.out_dim))


def by_input_of_halves(uncut: Uncut) -> Shard | None:
    """Each peer has a part of the inputs of each of two matrices that are kept as one; a bias stays whole."""
    return None if uncut.is_vector else _along(uncut, uncut.in_dim, _halves(uncut, uncut.in_dim))


def by_heads_of_qkv(uncut: Uncut) -> Shard:
    """Each peer has whole heads of query, key and value, which are kept as one matrix."""
    length = uncut.shape[uncut.out_dim]
    if length % 3:
        raise ValueError(
            f"packed_qkv_colwise needs query, key and value of one size, and {uncut.name!r} has {length} outputs; use "
            "separate projections for grouped-query attention"
        )
    section = length // 3
    if section % uncut.size:
        raise ValueError(
            f"packed_qkv_colwise gives each of {uncut.size} peers whole heads of {uncut.name!r}, whose query has "
            f"{section} outputs; use a tensor_parallel_size that divides the number of heads"
        )
    return Shard(uncut.out_dim, (section,) * 3)


def by_vocabulary(uncut: Uncut) -> Shard:
    """Each peer has the vectors of a part of an embedding's vocabulary."""
    return _along(uncut, 0)


def by_embedding_dim(uncut: Uncut) -> Shard:
    """Each peer has a part of every vector of an embedding."""
    return _along(uncut, 1)


def _along(uncut: Uncut, dim: int, sections: tuple[int, ...] | None = None) -> Shard:
    shard = Shard(dim, sections or (uncut.shape[dim],))
    if any(shard.local_length(rank, uncut.size) == 0 for rank in range(uncut.size)):
        raise ValueError(
            f"tensor parallelism gives each of {uncut.size} peers a part of {uncut.name!r}, whose dim {dim} has "
            f"{sum(shard.sections)} elements: too few; use a smaller tensor_parallel_size, or leave it out of the plan"
        )
    return shard


def _halves(uncut: Uncut, dim: int) -> tuple[int, int]:
    length = uncut.shape[dim]
    if length % 2:
        raise ValueError(
            f"a packed style needs two halves, and {uncut.name!r} has {length} elements along the packed dim"
        )
    return length // 2, length // 2
