"""Activation recomputation: what a forward leaves for backward is computed again instead of kept."""

from lightning_ptdp.recompute.choice import Choice, choose
from lightning_ptdp.recompute.install import Recomputation, install
from lightning_ptdp.recompute.moments import Beginning, is_recomputing

__all__ = ["Beginning", "Choice", "Recomputation", "choose", "install", "is_recomputing"]
