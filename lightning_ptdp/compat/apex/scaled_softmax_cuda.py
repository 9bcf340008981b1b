"""Apex's compiled module scaled_softmax_cuda: softmax(scale * x) over the last dim, of any size and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ptdp.kernels import scaled_softmax
from lightning_ptdp.kernels.softmax import softmax_gradient


@torch.no_grad()
def forward(x: Tensor, scale: float | Tensor) -> Tensor:
    """Compute softmax(scale * x) over the last dim; x: [..., queries, keys]."""
    return scaled_softmax(x, float(scale))


@torch.no_grad()
def backward(grad: Tensor, y: Tensor, scale: float | Tensor) -> Tensor:
    """Compute the gradient of x, from that of the output y."""
    return softmax_gradient(grad, y, float(scale))
