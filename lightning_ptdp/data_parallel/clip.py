"""Clips gradients by their norm over all ranks that hold a part of the model, each parameter counted once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import all_reduce_
from lightning_ptdp.kernels import sum_of_squares


def total_norm(gradients: Iterable[Tensor], group: ProcessGroup, device: torch.device) -> Tensor:
    """Compute the 2-norm of the gradients of the whole model.

    Args:
        gradients: those that this rank counts. Of a parameter that several ranks hold alike, one rank counts it.
        group: the ranks that hold the model once, t * p of them; t * p * d if replicas hold slices of gradients.
        device: where the result is.

    Returns:
        A scalar in float64, or in float32 on a device without float64; the same on every rank of the group.
    """
    counted = list(gradients)
    wide = torch.float64 if device.type != "mps" else torch.float32
    mine = sum_of_squares(counted).to(device) if counted else torch.zeros((), dtype=wide, device=device)
    return all_reduce_(mine, group).sqrt()


def clip_(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`, as `torch.nn.utils` does."""
    torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
