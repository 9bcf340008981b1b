"""Which blocks and modules recompute, worked out on every rank before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ptdp.names import matches, starred

CORE_ATTENTION = "core_attention"
"""A module of this name in a block is what "selective" recomputes there, where no names are given."""


@dataclass(frozen=True)
class Choice:
    """What recomputes, by names.

    Attributes:
        kind: "full" runs blocks again, "selective" runs parts of them again.
        stages: for each stage, the names of its blocks that recompute, in order.
        every: "full" keeps one input for so many blocks in a row.
        modules: names of the modules that "selective" runs again. In a block without any it computes attention scores
            again (`scores`).
    """

    kind: str
    stages: tuple[tuple[str, ...], ...]
    every: int = 1
    modules: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Number of blocks that recompute, in all stages."""
        return sum(map(len, self.stages))


def choose(
    module: nn.Module,
    stages: Sequence[Sequence[str]],
    *,
    kind: str,
    every: int = 1,
    layers: int | Sequence[int] | None = None,
    patterns: Sequence[str] = (),
) -> Choice:
    """Choose what recomputes in a module.

    Args:
        module: the whole one.
        stages: for each stage, the names of its blocks.
        kind: "full" or "selective", as `recompute` of the configuration.
        every: `recompute_every`, blocks for which "full" keeps one input.
        layers: `recompute_layers`, how many of a stage's first blocks recompute: of each stage, or one number for all.
            None takes all blocks.
        patterns: `recompute_modules`, dotted names with stars of what "selective" runs again.

    Returns:
        The choice. Of "selective" modules that lie in one another it has the outermost.

    Raises:
        ValueError: a stage has fewer blocks than it is to recompute, or a pattern matches no module in the blocks.
    """
    counts = [len(blocks) for blocks in stages] if layers is None else layers
    counts = [counts] * len(stages) if isinstance(counts, int) else list(counts)
    if layers is not None and any(n > len(blocks) for n, blocks in zip(counts, stages, strict=True)):
        raise ValueError(
            f"recompute_layers={layers!r} asks for more blocks than stages have: they have "
            f"{[len(blocks) for blocks in stages]}; use at most these, or None for all"
        )
    chosen = tuple(tuple(blocks[:n]) for n, blocks in zip(counts, stages, strict=True))
    if kind == "full":
        return Choice(kind, chosen, every)
    names = {name: [p for p in patterns if matches(p, name)] for name in _inside(module, stages)}
    unmatched = set(patterns) - {pattern for found in names.values() for pattern in found}
    if unmatched:
        raise ValueError(
            f"recompute_modules names {sorted(unmatched)}, which match no module in the blocks; there are "
            f"{sorted({starred(name) for name in names})}"
        )
    recomputed = _inside(module, chosen)
    wanted = [name for name in recomputed if names[name] or (not patterns and _last(name) == CORE_ATTENTION)]
    outermost = [name for name in wanted if not any(name.startswith(f"{other}.") for other in wanted)]
    return Choice(kind, chosen, modules=tuple(outermost))


def _inside(module: nn.Module, stages: Sequence[Sequence[str]]) -> list[str]:
    """Full names of all modules below the blocks."""
    return [
        f"{block}.{name}"
        for blocks in stages
        for block in blocks
        for name, _ in module.get_submodule(block).named_modules()
        if name
    ]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
