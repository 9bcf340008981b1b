"""Softmax of scaled attention scores: plain, masked, causal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.kernels import reference
from lightning_ptdp.kernels.library import OPERATIONS, LibraryOp, contiguous_like, is_compiled


def scaled_softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(scale * x) over the last dim, computed in float32; x: [..., queries, keys]."""
    return _softmax(x, None, scale, causal=False)


def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """`scaled_softmax` with no probability where the mask is True; a row that is masked throughout gives zeros.

    Args:
        x: [..., queries, keys].
        mask: boolean, of a shape that broadcasts to x's.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask is boolean, True where there is no attention; got {mask.dtype}; use mask.bool()")
    return _softmax(x, mask.expand(x.shape), scale, causal=False)


def scaled_causal_softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    """`scaled_softmax` in which query i sees keys up to i + keys - queries; a query that sees none gives zeros."""
    return _softmax(x, None, scale, causal=True)


def softmax_gradient(grad: Tensor, y: Tensor, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    """The gradient of the scores of any of these softmaxes, from that of the output and the output itself."""
    if is_compiled(y.device.type, y.dtype):
        result: Tensor = torch.ops.ptdp.softmax_backward(grad, y, scale, causal)
        return result
    return reference.softmax_gradient(grad, y, scale)


def _softmax(x: Tensor, mask: Tensor | None, scale: float, *, causal: bool) -> Tensor:
    if is_compiled(x.device.type, x.dtype):
        result: Tensor = torch.ops.ptdp.softmax(x, mask, scale, causal)
        return result
    return reference.softmax(x, mask, scale, causal)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (y,) = ctx.saved_tensors
    return torch.ops.ptdp.softmax_backward(grad, y, ctx.scale, ctx.causal), None, None, None


OPERATIONS.extend(
    (
        LibraryOp("softmax", contiguous_like, _save, _backward),
        LibraryOp("softmax_backward", contiguous_like),
    )
)
