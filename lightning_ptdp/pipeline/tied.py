"""Parameters that several pipeline ranks own: tied embeddings, and modules named in ``shared=``.

Each owner has its part of the gradient; all owners need the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import all_reduce_
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.buckets import GradientBuffers
from lightning_ptdp.pipeline.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class _Member:
    """A shared parameter; `parameter` is None on a rank that does not own it."""

    parameter: nn.Parameter | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedParameters:
    """Sums the gradients of parameters over the pipeline ranks that own them: one all-reduce for each set of owners."""

    def __init__(
        self, owned: Mapping[str, nn.Parameter], skeleton: Skeleton, groups: Groups, device: torch.device
    ) -> None:
        """owned: this rank's parameters, by name in the whole model."""
        self._device, self._ends, self._pipeline = device, groups.ends, groups.pipeline
        self._at_ends: list[_Member] = []
        self._anywhere: list[_Member] = []
        size = groups.topology.pipeline_parallel_size
        for name in skeleton.parameter_names:
            ranks = {stage % size for stage in skeleton.owners(name)}
            if len(ranks) < 2:
                continue
            mine = owned.get(name)
            shape = skeleton.shapes[name] if mine is None else tuple(mine.shape)
            member = _Member(mine, shape, torch.promote_types(skeleton.dtypes[name], torch.float32))
            (self._at_ends if ranks == {0, size - 1} else self._anywhere).append(member)

    def reduce(self, buffers: GradientBuffers) -> None:
        """Replace each shared gradient by its sum over the owners."""
        if self._at_ends and self._ends is not None:
            self._reduce(self._at_ends, self._ends, buffers)
        if self._anywhere:
            self._reduce(self._anywhere, self._pipeline, buffers)

    def _reduce(self, members: list[_Member], group: ProcessGroup, buffers: GradientBuffers) -> None:
        """Sum over the group; a rank that owns none of a member adds zeros. Flags at the end say which got a gradient."""
        views = [buffers.view(m.parameter) if m.parameter in buffers else None for m in members]
        touched = [view is not None and buffers.gradient(m.parameter) is not None for m, view in zip(members, views)]
        dtype = max((m.dtype for m in members), key=lambda d: torch.finfo(d).bits)
        lengths = [math.prod(m.shape) for m in members]
        flat = torch.zeros(sum(lengths) + len(members), dtype=dtype, device=self._device)
        parts = flat.split([*lengths, len(members)])
        for part, view in zip(parts, views, strict=False):
            if view is not None:
                part.copy_(view.reshape(-1))
        parts[-1].copy_(torch.tensor(touched, dtype=dtype))
        all_reduce_(flat, group)
        found = touched if all(touched) else [flag > 0 for flag in parts[-1].tolist()]
        for member, part, view, is_touched in zip(members, parts, views, found, strict=False):
            if member.parameter is not None and view is not None:
                view.copy_(part.view(view.shape))
                buffers.mark(member.parameter, is_touched)
