"""The parts of NVIDIA Apex that Megatron-LM and NeMo import, with the same names and signatures, on our operations.

Nothing of Apex is needed or imported. `install_apex_shims()` makes `import apex` and `import amp_C` find this package,
for code that cannot be changed.
"""

from lightning_ptdp.compat.apex import (
    amp_C,
    fused_weight_gradient_mlp_cuda,
    normalization,
    optimizers,
    scaled_masked_softmax_cuda,
    scaled_softmax_cuda,
    scaled_upper_triang_masked_softmax_cuda,
)
from lightning_ptdp.compat.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from lightning_ptdp.compat.apex.normalization import (
    FusedLayerNorm,
    FusedLayerNormAffineFunction,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from lightning_ptdp.compat.apex.optimizers import FusedAdam
from lightning_ptdp.compat.apex.shims import install_apex_shims

__all__ = [
    "FusedAdam",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "FusedLayerNormAffineFunction",
    "MultiTensorApply",
    "multi_tensor_applier",
    "amp_C",
    "normalization",
    "optimizers",
    "scaled_softmax_cuda",
    "scaled_masked_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
    "fused_weight_gradient_mlp_cuda",
    "install_apex_shims",
]
