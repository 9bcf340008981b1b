"""Apex's compiled module scaled_upper_triang_masked_softmax_cuda: causal softmax, of any size and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ptdp.kernels import scaled_causal_softmax
from lightning_ptdp.kernels.softmax import softmax_gradient


@torch.no_grad()
def forward(x: Tensor, scale: float | Tensor) -> Tensor:
    """Compute causal softmax(scale * x) over the last dim; x: [..., queries, keys]."""
    return scaled_causal_softmax(x, float(scale))


@torch.no_grad()
def backward(grad: Tensor, y: Tensor, scale: float | Tensor) -> Tensor:
    """Compute the gradient of x, from that of the output y."""
    return softmax_gradient(grad, y, float(scale), causal=True)
