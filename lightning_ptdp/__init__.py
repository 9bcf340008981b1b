"""Trains ordinary LightningModules under tensor x pipeline x data parallelism (PTD-P)."""

__version__ = "0.1.0"
