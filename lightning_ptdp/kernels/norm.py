"""LayerNorm and RMSNorm over the last dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.kernels import reference
from lightning_ptdp.kernels.library import OPERATIONS, LibraryOp, contiguous_like, is_compiled


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, *, memory_efficient: bool = False
) -> Tensor:
    """`F.layer_norm` over the last dim, computed in float32 and given in x's dtype.

    Args:
        x: [..., h].
        weight, bias: [h] of any floating dtype, or None.
        memory_efficient: keep the output for backward, which the next layer keeps anyway, in place of x; the gradient
            is then only as exact as x can be worked out from the output, and weights near 0 count as eps.
    """
    return _norm(x, weight, bias, eps, centers=True, saves_output=memory_efficient)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, memory_efficient: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; arguments as `layer_norm`."""
    return _norm(x, weight, None, eps, centers=False, saves_output=memory_efficient)


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centers: bool, saves_output: bool
) -> Tensor:
    if is_compiled(x.device.type, x.dtype):
        wide_weight = None if weight is None else weight.float()
        wide_bias = None if bias is None else bias.float()
        result: Tensor = torch.ops.ptdp.norm(x, wide_weight, wide_bias, eps, centers, saves_output)[0]
        return result
    return reference.norm(x, weight, bias, eps, centers=centers)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.eps, ctx.centers, ctx.saves_output = inputs
    y, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y if ctx.saves_output else x, weight, bias, mean, rstd)


def _backward(ctx: Any, grad: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None, None
    saved, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.ptdp.norm_backward(
        grad, saved, weight, bias, mean, rstd, ctx.eps, ctx.centers, ctx.saves_output
    )
    return dx, None if weight is None else dweight, None if bias is None else dbias, None, None, None


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centers: bool, saves_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    rstd = x.new_empty((rows,), dtype=torch.float32)
    mean = x.new_empty((rows if centers else 0,), dtype=torch.float32)
    return contiguous_like(x), mean, rstd


def _fake_backward(
    grad: Tensor,
    saved: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    centers: bool,
    saved_is_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = saved.shape[-1]
    dweight, dbias = (saved.new_empty((0 if v is None else width,), dtype=torch.float32) for v in (weight, bias))
    return contiguous_like(saved), dweight, dbias


OPERATIONS.extend((LibraryOp("norm", _fake, _save, _backward), LibraryOp("norm_backward", _fake_backward)))
