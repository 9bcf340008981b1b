"""The fused kernels as functions."""

from lightning_ptdp.kernels import (
    bias_dropout_add,
    bias_gelu,
    layer_norm,
    rms_norm,
    rotary_embedding,
    scaled_causal_softmax,
    scaled_masked_softmax,
    scaled_softmax,
    swiglu,
)
from lightning_ptdp.kernels.attention import causal_attention
from lightning_ptdp.kernels.cross_entropy import cross_entropy

__all__ = [
    "causal_attention",
    "cross_entropy",
    "layer_norm",
    "rms_norm",
    "bias_gelu",
    "swiglu",
    "bias_dropout_add",
    "rotary_embedding",
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_causal_softmax",
]
