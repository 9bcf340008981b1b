"""Ordinary modules whose forward is a fused kernel; state dicts are those of PyTorch's modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_ptdp import kernels


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, computed in float32; the output has the input's dtype, under autocast too.

    PyTorch's own runs if several dims are normalized.

    Args:
        memory_efficient: keep the output for backward instead of the input.
        others: as `nn.LayerNorm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine, bias=bias)
        self.memory_efficient = memory_efficient

    def forward(self, x: Tensor) -> Tensor:
        if len(self.normalized_shape) > 1:
            return super().forward(x)
        return kernels.layer_norm(x, self.weight, self.bias, self.eps, memory_efficient=self.memory_efficient)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, computed in float32; the output has the input's dtype, under autocast too.

    PyTorch's own runs if several dims are normalized.

    Args:
        memory_efficient: keep the output for backward instead of the input.
        others: as `nn.RMSNorm`, whose eps is that of the input's dtype if it is None.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, x: Tensor) -> Tensor:
        if len(self.normalized_shape) > 1:
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return kernels.rms_norm(x, self.weight, eps, memory_efficient=self.memory_efficient)


class GELU(nn.Module):
    """GELU approximated by tanh, as `nn.GELU(approximate="tanh")`."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.bias_gelu(x)


class SwiGLU(nn.Module):
    """silu(gate) * up of two tensors, or of the halves of one: [..., 2 h] -> [..., h]."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        if up is None:
            gate, up = gate.chunk(2, dim=-1)
        return kernels.swiglu(gate, up)


class BiasDropoutAdd(nn.Module):
    """residual + dropout(x + bias), which drops in training only.

    Args:
        p: probability to drop.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernels.bias_dropout_add(x, bias, residual, self.p, training=self.training)
