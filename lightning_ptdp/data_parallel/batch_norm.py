"""Batch normalization over the samples of all replicas, on any device: the statistics that one process would compute.

    replica 0  x -> mean, squares, count --+                      +-> normalize x of replica 0
                                           +-> merge, on each ----+
    replica 1  x -> mean, squares, count --+                      +-> normalize x of replica 1

Each replica computes the mean and the sum of squared deviations of its own samples; all are gathered, and merged by the
formula of Chan et al. (1983). A sample moves the merged statistics, and so the outputs of all replicas: in backward the
gradients of the statistics are summed over the replicas, which gives each sample its full gradient.
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
    """Let batch norms of a module train on the statistics of all ranks of a group.

    Args:
        module: whose batch norms are meant.
        group: the replicas.
        all_of_them: whether all batch norms do. If not, those do that the user made `nn.SyncBatchNorm`, whose own
            forward takes GPUs only, and statistics over all ranks of the run.

    Returns:
        A function that gives the modules their own forward back; None if no batch norm is changed.
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
    """Let a batch norm train on the statistics of the group; returns a function that undoes it."""
    base = type(module)

    def forward(self: Any, x: Tensor) -> Tensor:
        own: Tensor = base.forward(self, x) if not self.training else _normalize(self, x, group)
        return own

    return put_on(module, {"forward": forward})


def _normalize(norm: BatchNorm, x: Tensor, group: ProcessGroup) -> Tensor:
    """Normalize over all dims but the second and over all replicas, and move the running statistics.

    Args:
        norm: has weights, running statistics and eps, as `nn.BatchNorm2d` does.
        x: [b, c, ...], this replica's samples.
        group: the replicas, d of them.

    Returns:
        x's shape and dtype.
    """
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
    """Mean and biased variance over all replicas, [c] each, and the number of values of a channel, [1].

    All are float32 or wider.
    """
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
