"""Recipes: plain LightningModules with their configurations. Nothing here knows of parallelism."""
