"""Precisions that see every rank: loss scale, clipping, main weights."""
