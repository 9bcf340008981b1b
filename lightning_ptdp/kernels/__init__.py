"""Fused operations: compiled kernels where the machine has them, plain PyTorch of the same meaning elsewhere."""

from lightning_ptdp.kernels.activation import bias_gelu, swiglu
from lightning_ptdp.kernels.cross_entropy import cross_entropy
from lightning_ptdp.kernels.dropout_add import bias_dropout_add
from lightning_ptdp.kernels.library import Library, is_compiled, load, references
from lightning_ptdp.kernels.multi_tensor import (
    accumulate_weight_gradient,
    adam_,
    count_,
    l2_norms,
    scale_,
    sum_of_squares,
)
from lightning_ptdp.kernels.norm import layer_norm, rms_norm
from lightning_ptdp.kernels.reference import AdamStep
from lightning_ptdp.kernels.rotary import rotary_embedding
from lightning_ptdp.kernels.softmax import scaled_causal_softmax, scaled_masked_softmax, scaled_softmax

__all__ = [
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_causal_softmax",
    "layer_norm",
    "rms_norm",
    "bias_gelu",
    "swiglu",
    "bias_dropout_add",
    "rotary_embedding",
    "cross_entropy",
    "AdamStep",
    "adam_",
    "count_",
    "scale_",
    "l2_norms",
    "sum_of_squares",
    "accumulate_weight_gradient",
    "Library",
    "load",
    "is_compiled",
    "references",
]
