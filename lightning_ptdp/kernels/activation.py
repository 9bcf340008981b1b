"""Bias + GeLU, and SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.kernels import reference
from lightning_ptdp.kernels.library import OPERATIONS, LibraryOp, contiguous_like, is_compiled


def bias_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """gelu(x + bias) in the form by tanh, computed in float32 and given in x's dtype.

    x: [..., h]. bias: [h], or None.
    """
    if is_compiled(x.device.type, x.dtype) and x.ndim:
        result: Tensor = torch.ops.ptdp.bias_gelu(x, None if bias is None else bias.float())
        return result
    return reference.bias_gelu(x, bias)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 and given in gate's dtype; both [..., h], halves of one tensor for example.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu multiplies element by element, so gate and up have one shape and dtype; got {tuple(gate.shape)} "
            f"{gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    if is_compiled(gate.device.type, gate.dtype) and gate.ndim:
        result: Tensor = torch.ops.ptdp.swiglu(gate, up)
        return result
    return reference.swiglu(gate, up)


def _save_gelu(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    dx, dbias = torch.ops.ptdp.bias_gelu_backward(grad, x, bias)
    return dx, None if bias is None else dbias


def _save_swiglu(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.ops.ptdp.swiglu_backward(grad, *ctx.saved_tensors)
    return dgate, dup


def _fake_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), x.new_empty((0 if bias is None else x.shape[-1],), dtype=torch.float32)


OPERATIONS.extend(
    (
        LibraryOp("bias_gelu", lambda x, bias: contiguous_like(x), _save_gelu, _gelu_backward),
        LibraryOp("bias_gelu_backward", _fake_gelu_backward),
        LibraryOp("swiglu", lambda gate, up: contiguous_like(gate), _save_swiglu, _swiglu_backward),
        LibraryOp("swiglu_backward", lambda grad, gate, up: (contiguous_like(gate), contiguous_like(up))),
    )
)
