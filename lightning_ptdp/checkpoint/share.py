"""Which of the ranks that hold the same bytes writes them: each byte once, and as even as whole tensors allow."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from lightning_ptdp.checkpoint.rectangles import Placed
from lightning_ptdp.comm.collectives import gather_objects
from lightning_ptdp.comm.groups import Groups

Name = TypeVar("Name", bound=Hashable)


def share_out(
    tensors: Mapping[Name, Placed], objects: Mapping[Name, Any], groups: Groups
) -> tuple[dict[Name, Placed], dict[Name, Any]]:
    """What this rank writes of all that it holds; every rank of the world calls it.

    Of pipeline ranks that hold the same name, one writes; of its tensor peers and replicas, the one with least to do.
    """
    holders = gather_objects([*tensors, *objects], groups.pipeline)
    earlier = {name for names in holders[: groups.pipeline.rank()] for name in names}
    candidates = {name: placed for name, placed in tensors.items() if name not in earlier}
    at, topology = groups.at, groups.topology
    mine = _balance(candidates, topology.tensor_parallel_size, topology.data_parallel_size)[at.data][at.tensor]
    is_first = at.tensor == 0 and at.data == 0
    return (
        {name: placed for name, placed in candidates.items() if placed.is_alone or name in mine},
        {name: value for name, value in objects.items() if is_first and name not in earlier},
    )


def _balance(tensors: Mapping[Name, Placed], t: int, d: int) -> list[list[set[Name]]]:
    """What each [data][tensor] rank writes of what several hold; all find the same, since they look at whole sizes."""
    mine: list[list[set[Name]]] = [[set() for _ in range(t)] for _ in range(d)]
    load = [[0.0] * t for _ in range(d)]
    shared = [
        (math.prod(placed.size), name, placed.is_shared) for name, placed in tensors.items() if not placed.is_alone
    ]
    for numel, name, is_shared in sorted(shared, key=lambda item: item[0], reverse=True):
        if is_shared:
            _, r, i = min((load[r][i], r, i) for r in range(d) for i in range(t))
            load[r][i] += numel
            mine[r][i].add(name)
            continue
        r = min(range(d), key=lambda r: sum(load[r]))
        for i in range(t):
            load[r][i] += numel / t
            mine[r][i].add(name)
    return mine
