"""Tests of lightning_ptdp: one file per source file, under the same name."""
