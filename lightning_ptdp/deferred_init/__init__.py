"""Builds a module without values, and computes afterwards those that a rank owns."""

from lightning_ptdp.deferred_init.deferred import DeferredInit

__all__ = ["DeferredInit"]
