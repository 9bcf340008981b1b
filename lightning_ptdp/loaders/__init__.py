"""Adapts a user's loaders to replicas, and lets them go on in the middle of an epoch."""
