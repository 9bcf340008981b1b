"""Counts the parameters that each stage holds, and each of its ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.layout import Layout


@dataclass(frozen=True, slots=True)
class Holding:
    """How many elements the parameters of one stage have.

    Attributes:
        stage: its number.
        whole: elements of all its parameters, before tensor peers split them.
        local: elements that its first tensor rank holds.
    """

    stage: int
    whole: int
    local: int


def holdings(module: nn.Module, layout: Layout) -> list[Holding]:
    """Count what each stage will hold of a module that is still whole.

    A parameter that several stages own counts in each of them.
    """
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
    """Write the holdings as a table to print."""
    rows = [f"{'stage':>5}  {'parameters':>15}  {'on each rank':>15}"]
    rows += [f"{each.stage:>5}  {each.whole:>15,}  {each.local:>15,}" for each in found]
    return "\n".join(rows)


def _local_size(name: str, shape: tuple[int, ...], layout: Layout) -> int:
    """Elements of a parameter that tensor rank 0 holds, for the shape of the whole."""
    shard = layout.placement.shards.get(name)
    if shard is None:
        return math.prod(shape)
    length = shard.local_length(0, layout.topology.tensor_parallel_size)
    return math.prod(shape) // shape[shard.dim] * length
