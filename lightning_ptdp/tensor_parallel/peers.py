"""What the parallel forwards of a module know of their tensor group, and share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import copy_to, gather_from, gathered_to
from lightning_ptdp.host.torch import version_of
from lightning_ptdp.random_streams import SplitRegion
from lightning_ptdp.tensor_parallel.gathered import Joined


@dataclass
class Peers:
    """A tensor group, its random region, and the last input that was handed to split layers.

    sequence_length: of whole activations while a block runs on parts of the sequence, else None.
    """

    group: ProcessGroup
    region: SplitRegion
    sequence_length: int | None = None
    _copied: tuple[Tensor, tuple[int, bool], Tensor] | None = None
    _joined: Joined | None = None

    def __deepcopy__(self, _: Any) -> Peers:
        """A copy of a module has the same peers."""
        return self

    @property
    def size(self) -> int:
        """Number of peers."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.group.rank()

    def copy(self, tensor: Tensor) -> Tensor:
        """`copy_to`, once for all projections of one input in a row: their gradients are added before one all-reduce.

        Of what `join_sequence` returned, the gradient is summed and scattered instead, straight to the parts. The last
        copy is kept until `forget`, and used again for the same, unchanged input.
        """
        state = (version_of(tensor), torch.is_grad_enabled())
        if self._copied is None or self._copied[0] is not tensor or self._copied[1] != state:
            self._copied = tensor, state, self._copy(tensor)
        return self._copied[2]

    def _copy(self, tensor: Tensor) -> Tensor:
        joined = self.joined(tensor)
        return (
            copy_to(tensor, self.group) if joined is None else gathered_to(joined.part, tensor.detach(), self.group, 1)
        )

    def join_sequence(self, part: Tensor, dim: int) -> Tensor:
        """The whole of an activation split along the sequence."""
        whole = gather_from(part, self.group, dim, part.shape[dim] * self.size)
        self._joined = Joined(whole, part, self.group, dim)
        return whole

    def joined(self, tensor: Tensor) -> Joined | None:
        """How `join_sequence` made a tensor; None if it did not, or it was changed since."""
        return self._joined if self._joined is not None and self._joined.is_of(tensor) else None

    def forget(self) -> None:
        """Let go of the last input; what projected it is done."""
        self._copied = self._joined = None

    def moment(self) -> PeersMoment:
        """Where a forward begins, for one that runs again."""
        return PeersMoment(self, self.sequence_length, self.region.outside, self._joined)


@dataclass(frozen=True)
class PeersMoment:
    """What a forward began with: whether on a part of the sequence, whether in a split region, and the last input
    that was joined, which may be the forward's own."""

    peers: Peers
    sequence_length: int | None
    outside: list[tuple[torch.Generator, Tensor]] | None
    joined: Joined | None

    def end(self) -> None:
        """All of it is needed again."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, a second forward runs, which may leave off anywhere; afterwards the peers are where they were."""
        peers = self.peers
        present = peers.sequence_length, peers.region.outside
        peers.sequence_length, peers.region.outside = self.sequence_length, self.outside
        peers._copied, peers._joined = None, None if self.joined is None else self.joined.anew()
        try:
            yield
        finally:
            peers.sequence_length, peers.region.outside = present
            peers.forget()
