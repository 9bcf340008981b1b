"""Predictions of all replicas, where `Trainer.predict` returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_ptdp.comm.collectives import gather_objects_to
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.loaders.replicas import is_split
from lightning_ptdp.loaders.sampler import interleave


def join_predictions(predictions: Sequence[list[Any]], loaders: Sequence[object], groups: Groups) -> None:
    """Let the lists of replica 0 hold what all replicas predicted, in the order of one process; others' stay.

    Args:
        predictions: a list for each loader, of one prediction a batch; filled in place.
        loaders: those that the strategy did not split are left out.
        groups: of this rank.
    """
    first = groups.topology.data_ranks(groups.at)[0]
    for mine, loader in zip(predictions, loaders, strict=True):
        gathered = gather_objects_to(mine, first, groups.data) if is_split(loader) else None
        if gathered is not None:
            mine[:] = interleave(gathered)
