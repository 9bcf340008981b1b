"""Trains ordinary LightningModules under tensor x pipeline x data parallelism (PTD-P).

import lightning_ptdp
trainer = lightning.Trainer(strategy="ptdp", devices=8)
"""

from lightning_ptdp.check import check
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.precision.plugin import PTDPPrecision
from lightning_ptdp.strategy import PTDPStrategy

__version__ = "0.1.0"
__all__ = ["ParallelConfig", "PTDPPrecision", "PTDPStrategy", "check"]
