"""Keeps buffers that training moves, such as running statistics, alike: every replica takes those of replica 0.

That is DDP's rule, and like there only the statistics of replica 0's samples are kept. Only buffers that some replica
changed are sent. They are compared by value: batch norms write their statistics without telling autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import MAX, all_reduce_, broadcast_


class MovingBuffers:
    """Watches the buffers of a module, as far as this rank owns it."""

    def __init__(self, module: nn.Module, group: ProcessGroup, source: int) -> None:
        """
        Args:
            module: split already.
            group: the replicas.
            source: global rank of the group's member in replica 0.
        """
        self._module, self._group, self._source = module, group, source
        self._seen: dict[str, Tensor] = {}
        if group.size() > 1:
            self._seen = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def follow(self) -> None:
        """Give each buffer that any replica changed since the last call the values of replica 0."""
        buffers = dict(self._module.named_buffers()) if self._group.size() > 1 else {}
        if not buffers:
            return
        changed = torch.stack([_differ(buffer, self._seen.get(name)) for name, buffer in buffers.items()])
        for name, has_changed in zip(buffers, all_reduce_(changed.int(), self._group, MAX).tolist(), strict=True):
            if has_changed:
                broadcast_(buffers[name], self._source, self._group)
                self._seen[name] = buffers[name].clone()


def _differ(buffer: Tensor, seen: Tensor | None) -> Tensor:
    """Whether a buffer differs from what it was, as a boolean scalar on its device."""
    if seen is None or seen.shape != buffer.shape:
        return torch.ones((), dtype=torch.bool, device=buffer.device)
    return (buffer != seen).any()
