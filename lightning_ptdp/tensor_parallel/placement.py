"""What a plan means for a given module: styles, shards, and what must be summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_ptdp.names import starred
from lightning_ptdp.tensor_parallel.cuts import Uncut
from lightning_ptdp.tensor_parallel.linears import is_transposed
from lightning_ptdp.tensor_parallel.plan import attributes, match
from lightning_ptdp.tensor_parallel.shard import Shard
from lightning_ptdp.tensor_parallel.site import Site
from lightning_ptdp.tensor_parallel.styles import STYLES, Style, find_style


@dataclass(frozen=True)
class Placement:
    """What a plan means for a module.

    styles: the style's name for each module, by the module's name.
    shards: how parameters are cut, by every name that they have.
    summed: names of parameters whose gradient is summed over peers.
    sizes: names of integer attributes to divide.
    heads: names of the linears whose output is the vocabulary.
    regions: names of the column-parallel linears whose output goes to a row-parallel one of the same parent.
    sequence_blocks: name of the list of blocks that run on parts of the sequence; None without sequence parallelism.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, Shard] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    sizes: tuple[str, ...] = ()
    heads: frozenset[str] = frozenset()
    regions: frozenset[str] = frozenset()
    sequence_blocks: str | None = None


def place(module: nn.Module, plan: Mapping[str, str], size: int) -> tuple[Placement, list[str]]:
    """What a plan means for a module and `size` tensor peers, and what is wrong with that, a sentence each."""
    rows = {pattern: find_style(word) or Style(word) for pattern, word in plan.items()}  # `check_plan` tells of unknown
    sizes = tuple(
        name for pattern, style in rows.items() if style.divides_attribute for name in attributes(module, pattern)
    )
    faults = [
        f"{name} = {value} is to be divided by tensor_parallel_size={size}, which does not divide it"
        for name in sizes
        if (value := _attribute(module, name)) % size
    ]
    styles = {path: style for path, _ in module.named_modules() if (style := match(rows, path)) is not None}
    shards, found = _shards(module, rows, styles, size)
    found += _misused(module, styles)
    summed = [
        name
        for name, _ in module.named_parameters(remove_duplicate=False)
        if any(
            style is not None and style.sums_gradient
            for style in (match(rows, name), styles.get(name.rpartition(".")[0]))
        )
    ]
    placement = Placement(
        styles={path: style.name for path, style in styles.items()},
        shards=shards,
        summed=frozenset(summed),
        sizes=sizes,
        heads=frozenset(_heads(module, styles)),
        regions=frozenset(_regions(styles)),
    )
    return placement, faults + found


def with_sequence(module: nn.Module, placement: Placement, blocks: str) -> Placement:
    """The placement under sequence parallelism: what blocks hold whole is used on a part, and its gradient summed.

    Raises:
        ValueError: no norm of the blocks has the style sequence_parallel.
    """
    styles = {path: STYLES[name] for path, name in placement.styles.items() if name in STYLES}
    if not any(style.is_of_sequence and path.startswith(f"{blocks}.") for path, style in styles.items()):
        raise ValueError(
            f'sequence_parallel=True needs the norms before split layers named with the style "sequence_parallel" in '
            f"the tensor-parallel plan, and none in {blocks!r} is; add them, or use sequence_parallel=False"
        )
    partial = [
        name
        for name, _ in module.named_parameters(remove_duplicate=False)
        if name.startswith(f"{blocks}.")
        and name not in placement.shards
        and not ((style := styles.get(name.rpartition(".")[0])) and style.is_same_for_sequence)
    ]
    return replace(placement, summed=placement.summed | frozenset(partial), sequence_blocks=blocks)


def _attribute(module: nn.Module, name: str) -> int:
    path, _, leaf = name.rpartition(".")
    value = getattr(module.get_submodule(path), leaf)
    assert isinstance(value, int), "`attributes` finds integers"
    return value


def _shards(
    module: nn.Module, plan: Mapping[str, Style], styles: Mapping[str, Style], size: int
) -> tuple[dict[str, Shard], list[str]]:
    shards: dict[str, Shard] = {}
    cut: dict[nn.Parameter, tuple[str, Shard]] = {}
    faults: list[str] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        holder = module.get_submodule(path)
        style = match(plan, name) or styles.get(path)
        if style is None:
            continue
        try:
            shard = style.cut(Uncut(name, tuple(parameter.shape), is_transposed(holder), size))
        except ValueError as error:
            faults.append(str(error))
            continue
        if shard is None:
            continue
        shards[name] = shard
        first, other = cut.setdefault(parameter, (name, shard))
        if other != shard:
            faults.append(
                f"{name!r} and {first!r} are one tied parameter, and the plan cuts it in two ways ({shard} and "
                f"{other}); give both styles that cut the same dim (embedding_rowwise and colwise)"
            )
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in cut and name not in shards:
            faults.append(
                f"{name!r} and {cut[parameter][0]!r} are one tied parameter, and the plan cuts only the second; name "
                "both (embedding_rowwise and colwise_gather_output)"
            )
    return shards, list(dict.fromkeys(faults))


def _misused(module: nn.Module, styles: Mapping[str, Style]) -> Iterator[str]:
    """Styles on modules that they do not fit; of modules of like names the first is told."""
    seen: set[tuple[str, str]] = set()
    for path, style in styles.items():
        kind = (starred(path), style.name)
        if kind not in seen:
            seen.add(kind)
            fault = style.misfit(module.get_submodule(path), Site(module, path))
            if fault is not None:
                yield fault


def _heads(module: nn.Module, styles: Mapping[str, Style]) -> Iterator[str]:
    """Column-parallel linears outside any list of blocks whose output is the vocabulary."""
    vocabularies = {child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)}
    lists = [path for path, child in module.named_modules() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    for path, style in styles.items():
        child = module.get_submodule(path)
        if not style.can_be_head or not isinstance(child, nn.Linear):
            continue
        if child.out_features in vocabularies and not any(path.startswith(f"{name}.") for name in lists):
            yield path


def _regions(styles: Mapping[str, Style]) -> Iterator[str]:
    rows = [path for path, style in styles.items() if style.takes_split_input]
    for path, style in styles.items():
        parent = path.rpartition(".")[0]
        if style.splits_output and any(row.startswith(f"{parent}.") if parent else "." not in row for row in rows):
            yield path
