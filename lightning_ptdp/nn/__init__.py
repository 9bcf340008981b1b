"""Modules over the fused kernels, with PyTorch's parameters, names and meaning."""

from lightning_ptdp.nn import functional
from lightning_ptdp.nn.modules import GELU, BiasDropoutAdd, LayerNorm, RMSNorm, SwiGLU

__all__ = ["LayerNorm", "RMSNorm", "GELU", "SwiGLU", "BiasDropoutAdd", "functional"]
