"""The norm of all gradients over tensor, pipeline and data parallel ranks, each parameter counted once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import all_reduce_
from lightning_ptdp.kernels import sum_of_squares


def total_norm(gradients: Iterable[Tensor], group: ProcessGroup, device: torch.device) -> Tensor:
    """The 2-norm over the group.

    gradients: those that this rank counts: its shards, and what it is the one of several owners to count.
    group: the ranks that hold the model once (t * p).

    Returns a scalar in float64, in float32 where the device has no other; the same on every rank.
    """
    counted = list(gradients)
    wide = torch.float64 if device.type != "mps" else torch.float32
    mine = sum_of_squares(counted).to(device) if counted else torch.zeros((), dtype=wide, device=device)
    return all_reduce_(mine, group).sqrt()


def clip_(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`, as `torch.nn.utils` does."""
    torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
