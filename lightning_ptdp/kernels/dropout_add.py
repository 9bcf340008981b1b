"""Bias + dropout + residual add. The mask isn't kept: backward draws it again from a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_ptdp.kernels import reference
from lightning_ptdp.kernels.library import OPERATIONS, LibraryOp, contiguous_like, is_compiled


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.0, *, training: bool = True
) -> Tensor:
    """residual + dropout(x + bias), computed in float32 and given in x's dtype.

    One number of the device's global generator is drawn a call, and every element's fate follows from it and from the
    element's index: the same for compiled kernels and references, on CPUs and on CUDA.

    Args:
        x, residual: [..., h] of one dtype.
        bias: [h], or None.
        p: probability to drop, in [0, 1]; without `training` nothing is dropped.

    Raises:
        ValueError: p is no probability, or x and residual differ in shape or dtype.
    """
    if has_torch_function((x, residual)):  # for modes that look at dropout, as `F.dropout` does
        seen: Tensor = handle_torch_function(bias_dropout_add, (x, residual), x, bias, residual, p=p, training=training)
        return seen
    if not 0 <= p <= 1:
        raise ValueError(f"p is a probability between 0 and 1; got {p}")
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"x and residual are added element by element, so they have one shape and dtype; got {tuple(x.shape)} "
            f"{x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )
    drops = training and p > 0
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=x.device) if drops else _no_seed(x)
    if is_compiled(x.device.type, x.dtype) and x.ndim:
        wide_bias = None if bias is None else bias.float()
        result: Tensor = torch.ops.ptdp.dropout_add(x, wide_bias, residual, seed, p if drops else 0.0)
        return result
    return reference.dropout_add(x, bias, residual, seed, p if drops else 0.0)


def _no_seed(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, seed, ctx.p = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
    (seed,) = ctx.saved_tensors
    dx, dbias = torch.ops.ptdp.dropout_add_backward(grad, seed, ctx.p, ctx.has_bias)
    return dx, dbias if ctx.has_bias else None, grad, None, None


def _fake_backward(grad: Tensor, seed: Tensor, p: float, has_bias: bool) -> tuple[Tensor, Tensor]:
    return contiguous_like(grad), grad.new_empty((grad.shape[-1] if has_bias else 0,), dtype=torch.float32)


OPERATIONS.extend(
    (
        LibraryOp("dropout_add", lambda x, bias, residual, seed, p: contiguous_like(x), _save, _backward),
        LibraryOp("dropout_add_backward", _fake_backward),
    )
)
