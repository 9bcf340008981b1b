"""Sums the gradients of parameters that several pipeline ranks own: tied embeddings, and modules in ``shared=``.

Each owner uses the parameter in its own stages, and so has a part of its gradient. All owners step it, so that all need
the sum of these parts.
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

    Attributes:
        parameter: None on a rank that does not own it.
        owners: numbers of the pipeline ranks that own it.
        shape: of the shard that this rank holds, or would hold.
        dtype: in which the gradient is accumulated.
    """

    parameter: nn.Parameter | None
    owners: frozenset[int]
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedGradients:
    """Sums gradients over the pipeline ranks that own a parameter: one all-reduce for each set of owners."""

    def __init__(self, members: Sequence[SharedParameter], groups: Groups, device: torch.device) -> None:
        """
        Args:
            members: all such parameters of the pipeline, in the same order on all its ranks.
            groups: of this rank.
            device: where gradients are.
        """
        ends = {0, groups.topology.pipeline_parallel_size - 1}
        self._device, self._ends, self._pipeline = device, groups.ends, groups.pipeline
        self._at_ends = [member for member in members if member.owners == ends]
        self._elsewhere = [member for member in members if member.owners != ends]

    def reduce(self, buffers: GradientBuffers) -> None:
        """Replace each gradient of these parameters by its sum over the owners; every rank of a pipeline calls it."""
        if self._at_ends and self._ends is not None:
            self._reduce(self._at_ends, self._ends, buffers)
        if self._elsewhere:
            self._reduce(self._elsewhere, self._pipeline, buffers)

    def _reduce(self, members: list[SharedParameter], group: ProcessGroup, buffers: GradientBuffers) -> None:
        """Sum over a group that all owners are in; a rank without a gradient adds zeros.

        A flag a parameter, at the end of what is summed, counts the ranks that had a gradient.
        """
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
