"""Apex's compiled module scaled_masked_softmax_cuda: softmax(scale * x) where a mask is 0, of any size and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ptdp.kernels import scaled_masked_softmax
from lightning_ptdp.kernels.softmax import softmax_gradient


@torch.no_grad()
def forward(x: Tensor, mask: Tensor, scale: float | Tensor) -> Tensor:
    """Compute softmax(scale * x) where a mask is 0.

    Args:
        x: [b, heads, queries, keys].
        mask: nonzero where there is no attention, [b or 1, 1, queries, keys].
        scale: what the scores are multiplied by.
    """
    return scaled_masked_softmax(x, mask.bool(), float(scale))


@torch.no_grad()
def backward(grad: Tensor, y: Tensor, scale: float | Tensor) -> Tensor:
    """Compute the gradient of x, from that of the output y."""
    return softmax_gradient(grad, y, float(scale))


def get_batch_per_block(queries: int, keys: int, batch: int, heads: int) -> int:
    """Return 1, which divides every size: callers that ask whether theirs is divisible are told that it is."""
    return 1
