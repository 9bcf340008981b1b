"""Decides which stage owns which part of a module: blocks by cost, the rest by where it runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn

from lightning_ptdp.host.torch import children_of
from lightning_ptdp.names import join
from lightning_ptdp.pipeline.blocks import find_blocks
from lightning_ptdp.pipeline.reading_order import assign_by_source

# A lookup costs no multiplication, but its table is updated and its gradient filled: about this share of a matrix.
EMBEDDING_COST = 0.1

_LAST_WORDS = ("final", "ln_f", "out", "classifier", "pooler")
_FIRST_WORDS = ("emb", "wte", "wpe")


@dataclass(frozen=True)
class Partition:
    """Who owns what.

    blocks: name of the block list. block_names: of its members, in order.
    bounds: p * v + 1 block indices; stage k owns blocks bounds[k] .. bounds[k + 1] - 1.
    first, last: names of the modules (or bare parameters) outside the blocks that run before, and after them.
    shared: names that every stage keeps, their gradients summed.
    """

    blocks: str
    block_names: tuple[str, ...]
    bounds: tuple[int, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    shared: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, p * v."""
        return len(self.bounds) - 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks over all stages."""
        return self.bounds[-1]

    def stage_of_block(self, index: int) -> int:
        """The stage that owns a block."""
        return next(k for k, (low, high) in enumerate(pairwise(self.bounds)) if low <= index < high)

    @cached_property
    def _owner_of_outside(self) -> dict[str, frozenset[int]]:
        every = frozenset(range(self.num_stages))
        return (
            dict.fromkeys(self.first, frozenset({0}))
            | dict.fromkeys(self.last, frozenset({self.num_stages - 1}))
            | dict.fromkeys(self.shared, every)
        )

    def owners(self, name: str) -> frozenset[int]:
        """The stages that own the parameter or buffer of this full name."""
        prefix = f"{self.blocks}."
        if name.startswith(prefix):
            member = name[len(prefix) :].split(".", 1)[0]
            if member in self.block_names:
                return frozenset({self.stage_of_block(self.block_names.index(member))})
        path = name
        while path:
            if path in self._owner_of_outside:
                return self._owner_of_outside[path]
            path = path.rpartition(".")[0]
        return frozenset(range(self.num_stages))


ONE_STAGE = Partition("", (), (0, 0), (), (), ())
"""The pipeline of one: a stage that owns everything."""


def partition(
    module: nn.Module,
    num_stages: int,
    *,
    blocks: str | None = None,
    split: Sequence[int] | None = None,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    shared: Sequence[str] = (),
) -> Partition:
    """Cut a module into stages.

    num_stages: p * v.
    blocks: name of the block list; None finds it.
    split: blocks a stage in stage order; None balances by cost, embeddings and head counted.
    first, last, shared: names that correct the guess of where modules outside the blocks run.

    Raises:
        ValueError: fewer blocks than stages, a split that does not add up, or names that do not exist.
    """
    path = find_blocks(module, blocks)
    members = _members(module, path)
    costs = [module_cost(block) for block in members.values()]
    names = _assign_outside(module, path, first=first, last=last, shared=shared)
    if split is not None:
        if sum(split) != len(costs) or len(split) != num_stages:
            raise ValueError(
                f"pipeline_split={list(split)} must give {num_stages} stages that add up to the {len(costs)} blocks of "
                f"{path!r}; it gives {len(split)} stages and {sum(split)} blocks"
            )
        bounds = [sum(split[:k]) for k in range(num_stages + 1)]
    else:
        if len(costs) < num_stages:
            raise ValueError(
                f"each of the p * v = {num_stages} stages needs a block, and {path!r} has {len(costs)}; use "
                f"pipeline_parallel_size * virtual_pipeline_size <= {len(costs)}"
            )
        bounds = balance(
            costs,
            num_stages,
            before=sum(module_cost(module, name) for name in names["first"]),
            after=sum(module_cost(module, name) for name in names["last"]),
        )
    return Partition(
        blocks=path,
        block_names=tuple(members),
        bounds=tuple(bounds),
        first=tuple(names["first"]),
        last=tuple(names["last"]),
        shared=tuple(names["shared"]),
    )


def _members(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """The blocks by their names in the list.

    Raises:
        ValueError: one module is in the list several times, or a block is compiled to TorchScript.
    """
    holder = module.get_submodule(path)
    members = {name: child for name, child in children_of(holder).items() if child is not None}
    num_modules = len(set(members.values()))
    if num_modules < len(members):
        raise ValueError(
            f"{path!r} lists {len(members)} blocks that are {num_modules} modules, and a block that runs "
            "several times belongs to several stages; give each place a module of its own (their parameters may be "
            "tied), or use pipeline_parallel_size=1"
        )
    scripted = [name for name, child in members.items() if isinstance(child, torch.jit.ScriptModule)]
    if scripted:
        raise ValueError(
            f"blocks {scripted} of {path!r} are TorchScript, which no stage can enter or leave; use the plain modules "
            "(torch.compile is fine), or pipeline_parallel_size=1"
        )
    return members


def module_cost(module: nn.Module, name: str = "") -> float:
    """Relative compute of a module: its matrix elements, with lookups at `EMBEDDING_COST`.

    name: a module or bare parameter below `module`; "" for the module with all below it.
    """
    if not name:
        return sum((module_cost(child, "") for child in module.children()), _own_cost(module))
    parent, _, leaf = name.rpartition(".")
    holder = module.get_submodule(parent)
    if leaf in dict(holder.named_parameters(recurse=False)):
        return 0.0
    return _own_cost(module.get_submodule(name))


def _own_cost(module: nn.Module) -> float:
    matrices = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
    return matrices * (EMBEDDING_COST if isinstance(module, nn.Embedding) else 1.0)


def balance(costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0) -> list[int]:
    """Bounds of the contiguous split whose dearest stage is cheapest, and among those the most even one.

    Args:
        costs: one of each block.
        num_stages: p * v.
        before, after: the costs of what the first and the last stage run besides blocks.

    Returns:
        p * v + 1 bounds; every stage has at least one block.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def stage_cost(stage: int, low: int, high: int) -> float:
        extra = (before if stage == 0 else 0.0) + (after if stage == num_stages - 1 else 0.0)
        return sums[high] - sums[low] + extra

    def squared(stage: int, low: int, high: int) -> float:
        return stage_cost(stage, low, high) ** 2

    dearest, _ = _best_split(len(costs), num_stages, stage_cost, max, math.inf)
    _, bounds = _best_split(len(costs), num_stages, squared, operator.add, (dearest * (1 + 1e-12)) ** 2)
    return bounds


def _best_split(
    num_blocks: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    limit: float,
) -> tuple[float, list[int]]:
    """Dynamic programme over (stage, end): the least join of stage costs, none above `limit`, and its bounds."""
    best = [0.0] + [math.inf] * num_blocks
    choice: list[list[int]] = []
    for stage in range(num_stages):
        row, picked = [math.inf] * (num_blocks + 1), [0] * (num_blocks + 1)
        for high in range(stage + 1, num_blocks - (num_stages - stage - 1) + 1):
            for low in range(stage, high):
                own = cost(stage, low, high)
                value = join(best[low], own) if own <= limit else math.inf
                if value < row[high]:
                    row[high], picked[high] = value, low
        best = row
        choice.append(picked)
    bounds = [num_blocks]
    for picked in reversed(choice):
        bounds.append(picked[bounds[-1]])
    return best[num_blocks], bounds[::-1]


def _assign_outside(
    module: nn.Module, blocks: str, *, first: Sequence[str], last: Sequence[str], shared: Sequence[str]
) -> dict[str, list[str]]:
    """Names outside the blocks that hold parameters, each placed first, last or shared."""
    given = {"first": first, "last": last, "shared": shared}
    _check_names(module, blocks, given)
    assigned: dict[str, list[str]] = {"first": [], "last": [], "shared": []}
    for name in _outside(module, blocks):
        told = next((argument for argument, names in given.items() if any(_within(name, n) for n in names)), None)
        assigned[told or _guess(module, blocks, name)].append(name)
    return assigned


def _outside(module: nn.Module, blocks: str) -> list[str]:
    """Modules outside the blocks with parameters of their own; for ancestors of the blocks, the bare parameters."""
    names = []
    for path, child in module.named_modules():
        if path == blocks or path.startswith(f"{blocks}."):
            continue
        own = [name for name, _ in child.named_parameters(recurse=False)]
        if not own:
            continue
        if path == "" or blocks.startswith(f"{path}."):
            names += [join(path, name) for name in own]
        else:
            names.append(path)
    return names


def _guess(module: nn.Module, blocks: str, name: str) -> str:
    """Where a module runs: by the model's own plan, the source of its parent's forward, or its kind and name."""
    parent, _, list_name = blocks.rpartition(".")
    holder, _, leaf = name.rpartition(".")
    if leaf in dict(module.get_submodule(holder).named_parameters(recurse=False)):
        return "shared"  # a bare parameter of a container: small, and right wherever it is used
    inside = (
        name[len(parent) + 1 :].split(".", maxsplit=1)[0]
        if parent and name.startswith(f"{parent}.")
        else name.split(".", maxsplit=1)[0]
    )
    order = list(getattr(module.get_submodule(parent), "_pp_plan", None) or {})
    if inside in order and list_name in order:
        return "first" if order.index(inside) < order.index(list_name) else "last"
    read = assign_by_source(module, blocks, name)
    return read if read is not None else _guess_by_name(module, blocks, name)


def _guess_by_name(module: nn.Module, blocks: str, name: str) -> str:
    leaf = name.rpartition(".")[2].lower()
    if isinstance(module.get_submodule(name), nn.Embedding):
        return "first"
    if any(word in leaf for word in _LAST_WORDS) or "head" in name.lower():
        return "last"
    if any(word in name.lower() for word in _FIRST_WORDS):
        return "first"
    registered = [path for path, _ in module.named_modules()]
    return "first" if registered.index(name) < registered.index(blocks) else "last"


def _check_names(module: nn.Module, blocks: str, given: dict[str, Sequence[str]]) -> None:
    known = {name for name, _ in module.named_modules()} | {
        name for name, _ in module.named_parameters(remove_duplicate=False)
    }
    for argument, names in given.items():
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"{argument}={unknown} name no module or parameter outside the blocks {blocks!r}; those with "
                f"parameters are {_outside(module, blocks)}"
            )


def _within(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(f"{ancestor}.")
