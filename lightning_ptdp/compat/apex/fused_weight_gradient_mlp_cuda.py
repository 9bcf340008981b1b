"""Apex's compiled module fused_weight_gradient_mlp_cuda: weight gradients added into a main gradient, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ptdp.kernels import accumulate_weight_gradient


@torch.no_grad()
def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    """Add d_output^T input to main_grad, [h_out, h_in] in float32; the leading dims of both count as one."""
    accumulate_weight_gradient(main_grad, d_output, input)


@torch.no_grad()
def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, main_grad: Tensor) -> None:
    """Do the same as `wgrad_gemm_accum_fp32`, with a 16-bit main_grad."""
    accumulate_weight_gradient(main_grad, d_output, input)
