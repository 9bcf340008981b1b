"""Causal attention in little memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_ptdp.kernels.softmax import scaled_causal_softmax


def causal_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with a causal mask.

    PyTorch has a fused kernel for it, except with dropout on CPUs, where it keeps eight tensors of the scores' size in
    float32. There our softmax runs, and attention keeps what the paper (SC'21) counts: the probabilities, a byte of
    mask for each, and those that were not dropped.

    Args:
        query: [b, a, s, h/a].
        key: [b, a, s, h/a].
        value: [b, a, s, h/a].
        dropout: probability to drop an attention probability.

    Returns:
        [b, a, s, h/a].
    """
    if dropout == 0 or query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    probabilities = scaled_causal_softmax(query @ key.transpose(-1, -2), query.shape[-1] ** -0.5)
    return torch.native_dropout(probabilities, dropout, train=True)[0] @ value
