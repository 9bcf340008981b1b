"""Tensor parallelism from a plan: shards, their forwards, sharded logits, random streams."""
