"""Batch normalization over the samples of all replicas, on any device: the statistics of one process.

Each replica's means and sums of squared deviations are gathered and merged (Chan et al. 1983). Their gradients are
summed back, so that a sample's gradient counts what it does to the other replicas' outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import gather_to
from lightning_ptdp.host.torch import BatchNorm
from lightning_ptdp.own_class import put_on


def synchronize(module: nn.Module, group: ProcessGroup, *, all_of_them: bool) -> Callable[[], None] | None:
    """Let batch norms of a module train on the statistics of all ranks of the group.

    all_of_them: False takes those only that the user made `nn.SyncBatchNorm`, whose own way asks for GPUs and the
    whole world.

    Returns what gives the modules their own classes back; None where there is nothing to do.
    """
    chosen = BatchNorm if all_of_them and group.size() > 1 else nn.SyncBatchNorm
    found = [child for child in module.modules() if isinstance(child, chosen)]
    if not found:
        return None
    take_off = [_swap(child, group) for child in found]

    def undo() -> None:
        for each in take_off:
            each()

    return undo


def _swap(module: nn.Module, group: ProcessGroup) -> Callable[[], None]:
    """Let a batch norm train on the statistics of the group; returns what undoes it."""
    base = type(module)

    def forward(self: Any, x: Tensor) -> Tensor:
        own: Tensor = base.forward(self, x) if not self.training else _normalize(self, x, group)
        return own

    return put_on(module, {"forward": forward})


def _normalize(norm: BatchNorm, x: Tensor, group: ProcessGroup) -> Tensor:
    """x: [b, c, ...]. Normalized over every dim but the second, over all replicas."""
    mean, variance, count = _statistics(x, group)
    if norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None, "tracked together"
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        unbiased = variance * (count / (count - 1))
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    scale = (variance + norm.eps).rsqrt()
    output = (x - mean.view(shape)) * scale.view(shape)
    if norm.weight is not None:
        output = output * norm.weight.view(shape) + norm.bias.view(shape)
    return output.to(x.dtype)


def _statistics(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance, [c] each, and the number of values behind each, over all replicas; float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    dims, c = [0, *range(2, x.ndim)], x.shape[1]
    count = torch.full((1,), x.numel() // c, dtype=x.dtype, device=x.device)
    mean = x.mean(dims)
    squares = (x - mean.view(1, -1, *[1] * (x.ndim - 2))).square().sum(dims)
    rows = gather_to(torch.cat([mean, squares, count])[None], group, 0)
    means, squared, counts = rows[:, :c], rows[:, c : 2 * c], rows[:, 2 * c :].detach()
    total = counts.sum()
    merged = (means * counts).sum(0) / total
    spread = squared.sum(0) + ((means - merged).square() * counts).sum(0)
    return merged, spread / total, total
