"""How many parameters each stage holds, and each of its ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.layout import Layout


@dataclass(frozen=True, slots=True)
class Holding:
    """Parameters of one stage. whole: as they are in one process. local: those of its first tensor rank."""

    stage: int
    whole: int
    local: int


def holdings(module: nn.Module, layout: Layout) -> list[Holding]:
    """What each stage of a module that is still whole will hold; a tied or shared weight counts on each that has it."""
    whole, local = [0] * layout.num_stages, [0] * layout.num_stages
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, aliases in names.items():
        stages = frozenset().union(*map(layout.partition.owners, aliases))
        for stage in stages:
            whole[stage] += parameter.numel()
            local[stage] += _local_size(aliases[0], tuple(parameter.shape), layout)
    return [Holding(stage, whole[stage], local[stage]) for stage in range(layout.num_stages)]


def table(found: list[Holding]) -> str:
    """The holdings as lines to print."""
    rows = [f"{'stage':>5}  {'parameters':>15}  {'on each rank':>15}"]
    rows += [f"{each.stage:>5}  {each.whole:>15,}  {each.local:>15,}" for each in found]
    return "\n".join(rows)


def _local_size(name: str, shape: tuple[int, ...], layout: Layout) -> int:
    shard = layout.placement.shards.get(name)
    if shard is None:
        return math.prod(shape)
    length = shard.local_length(0, layout.topology.tensor_parallel_size)
    return math.prod(shape) // shape[shard.dim] * length
