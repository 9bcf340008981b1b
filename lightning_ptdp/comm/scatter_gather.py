"""What tensor peers hold alike crosses a cut of the pipeline once: each sends a part, and the receivers join them.

    sender peers    whole | whole          each takes its part
    wire            part 0, part 1         1/t of the bytes (SC'21 section 4.1)
    receiver peers  whole | whole          all-gather

A module does not say which of its tensors peers hold alike: a block may return a peer's own heads, and a gradient may
be partial where its activation is not. So it is found out. The first time that a tensor is sent, peers compare its
bits, and what is the same goes in parts from then on. At the end of every batch they compare what they shared out, so
that tensors which stopped being alike end the run before a weight is changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import MAX, MIN, all_gather_dim, all_reduce_, gather_objects, own_chunk

_TOLERANCE = 1e-3  # of a tensor's norm, or 8 roundings of its dtype: kernels may round in another order on each peer


class ScatterGather:
    """Parts of what the peers of a tensor group hold alike."""

    def __init__(self, group: ProcessGroup, replica: ProcessGroup) -> None:
        """
        Args:
            group: the t tensor peers.
            replica: the t * p ranks of all stages, which learn together that peers differ.
        """
        self._group, self._replica = group, replica
        self._names: list[str] = []
        self._measured: list[Tensor] = []

    def alike(self, tensors: Sequence[Tensor]) -> tuple[bool, ...]:
        """Find the tensors that have the same bits on every peer and can go in parts; the peers call it together.

        Only floating tensors can, whose length the group's size divides.
        """
        size = self._group.size()
        if size == 1:
            return (False,) * len(tensors)
        mine = [t.is_floating_point() and t.numel() % size == 0 and self._is_least(t) for t in tensors]
        flags = torch.tensor(mine, dtype=torch.int32)
        return tuple(flag > 0 for flag in all_reduce_(flags, self._group, MIN).tolist())

    def part(self, tensor: Tensor, name: str) -> Tensor:
        """Take this peer's part, [numel/t], in memory of its own; `check` calls it by `name` if peers differ."""
        kind = torch.promote_types(tensor.dtype, torch.float32)
        self._names.append(name)
        tolerance = max(_TOLERANCE, 8 * torch.finfo(tensor.dtype).eps)
        norm, total = torch.linalg.vector_norm(tensor, dtype=kind), tensor.sum(dtype=kind)
        self._measured.append(torch.stack([norm * tolerance, norm, total]))  # on the device: nothing waits for it here
        return own_chunk(tensor.reshape(-1), self._group, 0).clone()

    def like_part(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make room, [numel/t], for a part of a tensor of `shape`."""
        return torch.empty(math.prod(shape) // self._group.size(), dtype=dtype, device=device)

    def join(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Join the parts, [numel/t], that the peers received, to the tensor of `shape`."""
        return all_gather_dim(part, self._group, 0, math.prod(shape)).view(*shape)

    def check(self) -> None:
        """Compare what was shared out since the last call; the replica's ranks call it together.

        Raises:
            RuntimeError: peers held something in different values; on every rank of the replica.
        """
        off = self._differing() if self._names else []
        self._names, self._measured = [], []
        if not all_reduce_(torch.tensor(len(off)), self._replica, MAX):
            return
        seen = [name for names in gather_objects(off, self._replica) for name in names]
        raise RuntimeError(
            f"tensor-parallel peers hold {', '.join(dict.fromkeys(seen))} in different values, where the first ones "
            "were the same on all of them, so that each peer sent a part: a block hands on a peer's own part of "
            "something, or draws differently on each peer; use scatter_gather=False"
        )

    def _differing(self) -> list[str]:
        """Names of what differs between the peers; a number that isn't finite counts as 0."""
        mine = torch.stack(self._measured).nan_to_num(0.0, 0.0, 0.0).double().cpu()[None]
        everyone = all_gather_dim(mine, self._group, 0, self._group.size())
        allowed, spread = everyone.amax(0)[:, 0], (everyone.amax(0) - everyone.amin(0))[:, 1:].amax(1)
        return [name for name, is_off in zip(self._names, (spread > allowed).tolist(), strict=True) if is_off]

    def _is_least(self, tensor: Tensor) -> bool:
        """Whether no peer has a lower bit anywhere; where that holds for all of them they are the same."""
        bits = tensor.detach().reshape(-1).view(torch.uint8)
        return torch.equal(all_reduce_(bits.clone(), self._group, MIN), bits)
