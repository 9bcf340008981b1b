"""Gradient buffers, their reduction over replicas, and the norm over every rank."""
