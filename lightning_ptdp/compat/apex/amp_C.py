"""Apex's compiled module amp_C: operations on lists of tensors."""  # noqa: N999  the name is Apex's

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ptdp.kernels import AdamStep, adam_, l2_norms, scale_

Lists = Sequence[Sequence[Tensor]]

_ADAM_W = 1  # the mode of `multi_tensor_adam` that decays weights by themselves


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """Compute outputs = scale * inputs for tensor_lists = [inputs, outputs].

    noop_flag becomes 1 if a result isn't finite.
    """
    inputs, outputs = tensor_lists
    found = torch.zeros(1, device=noop_flag.device)
    scale_(inputs, outputs, float(scale), found)
    noop_flag.masked_fill_(found.bool().view(noop_flag.shape), 1)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Compute the norm of all tensors in tensor_lists = [tensors].

    Returns:
        The norm, [1], and with per_tensor that of each tensor, [n], else an empty tensor.
    """
    (tensors,) = tensor_lists
    total, each = l2_norms(tensors)
    return total.view(1), each if per_tensor else each.new_empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Compute `multi_tensor_l2norm` of inv_scale * tensors; the tensors stay as they are."""
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    return total * inv_scale, each * inv_scale


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of Adam on tensor_lists = [gradients, weights, first moments, second moments].

    As Apex's, it neither reads nor sets noop_flag: what isn't finite spreads.

    Args:
        mode: 0 is Adam with L2 regularisation, 1 is AdamW.
        others: as Apex's; chunk_size and noop_flag are not used.

    Raises:
        ValueError: some of the weights are float32, and others in 16 bits.
    """
    grads, weights, first, second = tensor_lists
    wide = [weight if weight.dtype == torch.float32 else weight.float() for weight in weights]
    copies = [weight for weight in weights if weight.dtype != torch.float32]
    if copies and len(copies) < len(weights):
        raise ValueError("weights of one call have one dtype; got float32 and 16-bit ones")
    numbers = AdamStep(
        lr=float(lr),
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        step=int(step),
        decoupled=mode == _ADAM_W,
        corrects_bias=bool(bias_correction),
    )
    adam_(wide, grads, first, second, numbers, copies=copies)
