"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.kernels import reference
from lightning_ptdp.kernels.library import OPERATIONS, LibraryOp, contiguous_like, is_compiled


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (x[j], x[j + r]) of the last dim by an angle each, as Llama and GPT-NeoX do.

    Args:
        x: [..., d], of any strides.
        cos, sin: of the angles, of a shape that broadcasts to [..., r], r at most d/2; they get no gradient. What lies
            beyond 2 r is left as it is.

    Returns:
        x's shape and dtype, contiguous; computed in float32.

    Raises:
        ValueError: r is too large, or cos and sin differ in shape.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            f"cos and sin have one shape whose last dim is at most half of x's; got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)} for x {tuple(x.shape)}; give each angle once"
        )
    cos, sin = (angles.detach().expand(*x.shape[:-1], half) for angles in (cos, sin))
    if is_compiled(x.device.type, x.dtype):
        result: Tensor = torch.ops.ptdp.rotary(x, cos.float(), sin.float(), False)
        return result
    return reference.rotary(x, cos, sin, inverse=False)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.ptdp.rotary(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


OPERATIONS.extend((LibraryOp("rotary", contiguous_like, _save, _backward),))
