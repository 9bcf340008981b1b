"""LayerNorm and RMSNorm under Apex's names, as apex.normalization and apex.normalization.fused_layer_norm have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ptdp.kernels import layer_norm, rms_norm
from lightning_ptdp.nn import LayerNorm, RMSNorm


class _WithApexArguments:
    """Gives a norm the arguments of Apex's norms, by position as there."""

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient=memory_efficient)  # type: ignore[call-arg]  # those of the norm that comes next


class FusedLayerNorm(_WithApexArguments, LayerNorm):
    """LayerNorm with the arguments of apex.normalization.FusedLayerNorm."""


class FusedRMSNorm(_WithApexArguments, RMSNorm):
    """RMSNorm with the arguments of apex.normalization.FusedRMSNorm."""


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm whose output has the weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm whose output has the weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


class FusedLayerNormAffineFunction:
    """`apply` has the arguments of Apex's autograd function."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Compute LayerNorm over the last dims, which normalized_shape gives."""
        flat = _flatten(input, normalized_shape)
        y = layer_norm(flat, weight.reshape(-1), bias.reshape(-1), eps, memory_efficient=memory_efficient)
        return y.view(input.shape)


class FusedRMSNormAffineFunction:
    """`apply` has the arguments of Apex's autograd function."""

    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Compute RMSNorm over the last dims, which normalized_shape gives."""
        flat = _flatten(input, normalized_shape)
        return rms_norm(flat, weight.reshape(-1), eps, memory_efficient=memory_efficient).view(input.shape)


def _flatten(input: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """Join the normalized dims into one, and all dims before them into another."""
    last = tuple(normalized_shape)
    if tuple(input.shape[input.ndim - len(last) :]) != last:
        raise ValueError(f"normalized_shape names the last dims; got {last} for an input {tuple(input.shape)}")
    return input.reshape(-1, math.prod(last))
