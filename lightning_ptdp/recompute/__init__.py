"""Activation recomputation: what a forward leaves for backward is computed again instead of kept."""

from lightning_ptdp.recompute.install import Recomputation, install
from lightning_ptdp.recompute.moments import Beginning, is_recomputing
from lightning_ptdp.recompute.plan import Plan, plan

__all__ = ["Beginning", "Plan", "Recomputation", "install", "is_recomputing", "plan"]
