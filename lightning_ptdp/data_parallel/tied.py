"""Parameters that several pipeline ranks own: tied embeddings, and modules named in ``shared=``.

Each owner has its part of the gradient; all owners need the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import all_reduce_
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.buckets import GradientBuffers


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter with several owners, as one rank of the pipeline sees it.

    parameter: None on a rank that does not own it. owners: pipeline ranks.
    shape, dtype: of this rank's shard, and of the gradient's accumulation.
    """

    parameter: nn.Parameter | None
    owners: frozenset[int]
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedGradients:
    """Sums gradients over the pipeline ranks that own a parameter: one all-reduce for each set of owners."""

    def __init__(self, members: Sequence[SharedParameter], groups: Groups, device: torch.device) -> None:
        """members: in an order that all ranks of a pipeline share."""
        ends = {0, groups.topology.pipeline_parallel_size - 1}
        self._device, self._ends, self._pipeline = device, groups.ends, groups.pipeline
        self._at_ends = [member for member in members if member.owners == ends]
        self._elsewhere = [member for member in members if member.owners != ends]

    def reduce(self, buffers: GradientBuffers) -> None:
        """Replace each shared gradient by its sum over the owners."""
        if self._at_ends and self._ends is not None:
            self._reduce(self._at_ends, self._ends, buffers)
        if self._elsewhere:
            self._reduce(self._elsewhere, self._pipeline, buffers)

    def _reduce(self, members: list[SharedParameter], group: ProcessGroup, buffers: GradientBuffers) -> None:
        """Sum over the group; a rank without a gradient adds zeros, and flags at the end say who had one."""
        mine = [m.parameter if m.parameter in buffers else None for m in members]
        views = [None if p is None else buffers.view(p) for p in mine]
        touched = [p is not None and buffers.gradient(p) is not None for p in mine]
        dtype = max((m.dtype for m in members), key=lambda d: torch.finfo(d).bits)
        flat = torch.zeros(sum(math.prod(m.shape) for m in members) + len(members), dtype=dtype, device=self._device)
        *parts, flags = flat.split([*(math.prod(m.shape) for m in members), len(members)])
        for part, view in zip(parts, views, strict=True):
            if view is not None:
                part.copy_(view.reshape(-1))
        flags.copy_(torch.tensor(touched, dtype=dtype))
        all_reduce_(flat, group)
        found = touched if all(touched) else [flag > 0 for flag in flags.tolist()]
        for parameter, part, view, is_touched in zip(mine, parts, views, found, strict=True):
            if parameter is not None and view is not None:
                view.copy_(part.view(view.shape))
                buffers.mark(parameter, is_touched)
