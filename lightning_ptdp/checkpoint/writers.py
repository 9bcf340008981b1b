"""Which of the ranks that hold the same bytes writes them: each byte once, and as even as whole tensors allow."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from lightning_ptdp.checkpoint.rectangles import Located
from lightning_ptdp.comm.collectives import gather_objects
from lightning_ptdp.comm.groups import Groups

Name = TypeVar("Name", bound=Hashable)


def assign_writers(
    tensors: Mapping[Name, Located], objects: Mapping[Name, Any], groups: Groups
) -> tuple[dict[Name, Located], dict[Name, Any]]:
    """Choose what this rank writes of all that it holds; every rank of the world calls it.

    Of pipeline ranks that hold the same name, one writes; of its tensor peers and replicas, the one with least to do.

    Args:
        tensors, objects: all that this rank holds, by name.
        groups: of this rank.

    Returns:
        The tensors and objects that this rank writes, and no other.
    """
    holders = gather_objects(list(tensors), groups.pipeline)
    earlier = {name for names in holders[: groups.pipeline.rank()] for name in names}
    at, topology = groups.at, groups.topology
    writers = _Writers(topology.tensor_parallel_size, topology.data_parallel_size)
    candidates = {name: located for name, located in tensors.items() if name not in earlier}
    by_size = sorted(candidates, key=lambda name: math.prod(candidates[name].size), reverse=True)
    mine = {name for name in by_size if writers.takes(candidates[name], at.tensor, at.data)}
    before = {name for names in gather_objects(list(objects), groups.world)[: groups.rank] for name in names}
    return (
        {name: located for name, located in candidates.items() if name in mine},
        {name: value for name, value in objects.items() if name not in before},
    )


class _Writers:
    """Decides which of the ranks that hold a tensor writes it: the one with the fewest elements to write so far.

    All of them decide alike without a message, because each counts the elements of whole tensors, in the same order.
    """

    def __init__(self, t: int, d: int) -> None:
        self._everywhere = [[0.0] * t for _ in range(d)]
        self._on_replicas = [0.0] * d
        self._on_peers = [0.0] * t

    def takes(self, located: Located, tensor: int, data: int) -> bool:
        """Whether this rank, of those that hold a tensor, writes it.

        Args:
            located: where the tensor lies.
            tensor, data: the number of this rank among its tensor peers, and its replicas.
        """
        numel = math.prod(located.size)
        if located.on_tensor_peers and located.on_replicas:
            _, r, i = min((load, r, i) for r, row in enumerate(self._everywhere) for i, load in enumerate(row))
            self._everywhere[r][i] += numel
            return (r, i) == (data, tensor)
        if located.on_replicas:
            return _next(self._on_replicas, numel) == data
        return not located.on_tensor_peers or _next(self._on_peers, numel) == tensor


def _next(load: list[float], amount: int) -> int:
    """The index of the least load, which grows by `amount`."""
    i = load.index(min(load))
    load[i] += amount
    return i
