"""What a plan means for a given module: styles, shards, and what must be summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_ptdp.names import starred
from lightning_ptdp.tensor_parallel.plan import OTHER_NAMES, attributes, match
from lightning_ptdp.tensor_parallel.shard import Shard


@dataclass(frozen=True)
class Placement:
    """What a plan means for a module.

    styles: of modules, by name. shards: of parameters, by every name they have. sizes: names of integer attributes to
    divide. summed: parameters whose gradient is summed over peers. heads: the linears whose output is the vocabulary.
    regions: column-parallel linears whose output goes to a row-parallel one of the same parent.
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
    plan = {pattern: OTHER_NAMES.get(style, style) for pattern, style in plan.items()}
    sizes = tuple(
        name for pattern, style in plan.items() if style == "local_size" for name in attributes(module, pattern)
    )
    faults = [
        f"{name} = {value} is to be divided by tensor_parallel_size={size}, which does not divide it"
        for name in sizes
        if (value := _attribute(module, name)) % size
    ]
    styles: dict[str, str] = {}
    for path, _ in module.named_modules():
        style = match(plan, path)
        if style is not None:
            styles[path] = style
    shards, found = _shards(module, plan, styles, size)
    found += _misused(module, styles)
    summed = [
        name
        for name, _ in module.named_parameters(remove_duplicate=False)
        if "replicated_with_grad_allreduce" in (match(plan, name), styles.get(name.rpartition(".")[0]))
    ]
    placement = Placement(
        styles=styles,
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
    norms = [p for p, s in placement.styles.items() if s == "sequence_parallel" and p.startswith(f"{blocks}.")]
    if not norms:
        raise ValueError(
            f'sequence_parallel=True needs the norms before split layers named with the style "sequence_parallel" in '
            f"the tensor-parallel plan, and none in {blocks!r} is; add them, or use sequence_parallel=False"
        )
    partial = [
        name
        for name, _ in module.named_parameters(remove_duplicate=False)
        if name.startswith(f"{blocks}.")
        and name not in placement.shards
        and placement.styles.get(name.rpartition(".")[0]) != "replicate"
    ]
    return replace(placement, summed=placement.summed | frozenset(partial), sequence_blocks=blocks)


def _attribute(module: nn.Module, name: str) -> int:
    path, _, leaf = name.rpartition(".")
    value = getattr(module.get_submodule(path), leaf)
    assert isinstance(value, int), "_attributes finds integers"
    return value


def _shards(
    module: nn.Module, plan: Mapping[str, str], styles: Mapping[str, str], size: int
) -> tuple[dict[str, Shard], list[str]]:
    shards: dict[str, Shard] = {}
    cut: dict[nn.Parameter, tuple[str, Shard]] = {}
    faults: list[str] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        holder = module.get_submodule(path)
        style = match(plan, name) or styles.get(path)
        if style is None:
            continue
        try:
            shard = shard_of(holder, leaf, style, size, where=name)
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


def _misused(module: nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    """Styles on modules that they do not fit; of modules of like names the first is told."""
    seen: set[tuple[str, str]] = set()
    for path, style in styles.items():
        child = module.get_submodule(path)
        kind, pattern = type(child).__name__, starred(path)
        if (pattern, style) in seen:
            continue
        seen.add((pattern, style))
        own = {name for name, _ in child.named_parameters(recurse=False)}
        if style.startswith("embedding") and not isinstance(child, nn.Embedding):
            yield f"style {style!r} is for nn.Embedding, and {path!r} is a {kind}"
        elif style in _LINEAR_STYLES and any(True for _ in child.children()):
            yield (
                f"style {style!r} is for linear layers, and {path!r} ({kind}) holds modules of its own; name those "
                "instead"
            )
        elif style in (*_LINEAR_STYLES, "embedding_rowwise", "embedding_colwise") and own and "weight" not in own:
            yield (
                f"style {style!r} cuts the weight of {path!r} ({kind}), which is worked out from other parameters "
                f"({', '.join(sorted(own))}); remove its weight norm or spectral norm, or leave {pattern!r} out of the "
                "plan"
            )
        elif style in _ROW_STYLES and isinstance(child, nn.Linear) and type(child).forward is not nn.Linear.forward:
            yield (
                f"style {style!r} runs the plain product of nn.Linear, and {path!r} ({kind}) has a forward of its "
                "own, which would be passed over; leave it out of the plan"
            )
        elif style == "mla_kv_a_proj" and rotary_width(module, path) is None:
            yield (
                f"style {style!r} needs to know how many outputs of {path!r} are rotary, and no module around it has "
                "qk_rope_head_dim, or config.qk_rope_head_dim; leave it out of the plan"
            )


def rotary_width(module: nn.Module, path: str) -> int | None:
    """How many outputs of a compressed key projection are rotary, as the nearest module around it says."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        holder = module.get_submodule(".".join(parts[:length]))
        for place in (holder, getattr(holder, "config", None)):
            width = getattr(place, "qk_rope_head_dim", None)
            if isinstance(width, int):
                return width
    return None


_ROW_STYLES = ("rowwise", "rowwise_split_input", "packed_rowwise")
_LINEAR_STYLES = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "packed_qkv_colwise")


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as [in, out], as GPT-2's Conv1D does."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)


def shard_of(  # noqa: PLR0911  one return a style
    holder: nn.Module, leaf: str, style: str, size: int, *, where: str
) -> Shard | None:
    """How a style cuts the parameter `leaf` of a module; None where it stays whole.

    Raises:
        ValueError: it cannot be cut so.
    """
    parameter = holder.get_parameter(leaf)
    ndim, is_vector = parameter.ndim, parameter.ndim == 1
    out_dim = ndim - 1 if is_vector or is_transposed(holder) else ndim - 2
    in_dim = ndim - 2 if is_transposed(holder) else ndim - 1
    length = parameter.shape
    if style in ("colwise", "colwise_gather_output"):
        return _whole_units(Shard(out_dim, (length[out_dim],)), size, where)
    if style in ("rowwise", "rowwise_split_input"):
        return None if is_vector else _whole_units(Shard(in_dim, (length[in_dim],)), size, where)
    if style == "packed_colwise":
        return _whole_units(Shard(out_dim, _halves(length[out_dim], where)), size, where)
    if style == "packed_rowwise":
        return None if is_vector else _whole_units(Shard(in_dim, _halves(length[in_dim], where)), size, where)
    if style == "packed_qkv_colwise":
        return _by_heads(length[out_dim], out_dim, size, where)
    if style == "embedding_rowwise":
        return _whole_units(Shard(0, (length[0],)), size, where)
    if style == "embedding_colwise":
        return _whole_units(Shard(1, (length[1],)), size, where)
    return None


def _whole_units(shard: Shard, size: int, where: str) -> Shard:
    if any(shard.local_length(rank, size) == 0 for rank in range(size)):
        raise ValueError(
            f"tensor parallelism gives each of {size} peers a part of {where!r}, whose dim {shard.dim} has "
            f"{sum(shard.sections)} elements: too few; use a smaller tensor_parallel_size, or leave it out of the plan"
        )
    return shard


def _halves(length: int, where: str) -> tuple[int, int]:
    if length % 2:
        raise ValueError(f"a packed style needs two halves, and {where!r} has {length} elements along the packed dim")
    return length // 2, length // 2


def _by_heads(length: int, dim: int, size: int, where: str) -> Shard:
    if length % 3:
        raise ValueError(
            f"packed_qkv_colwise needs query, key and value of one size, and {where!r} has {length} outputs; use "
            "separate projections for grouped-query attention"
        )
    section = length // 3
    if section % size:
        raise ValueError(
            f"packed_qkv_colwise gives each of {size} peers whole heads of {where!r}, whose query has {section} "
            "outputs; use a tensor_parallel_size that divides the number of heads"
        )
    return Shard(dim, (section,) * 3)


def _heads(module: nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    """Column-parallel linears outside any list of blocks whose output is the vocabulary."""
    vocabularies = {child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)}
    lists = [path for path, child in module.named_modules() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    for path, style in styles.items():
        child = module.get_submodule(path)
        if style not in ("colwise", "colwise_gather_output") or not isinstance(child, nn.Linear):
            continue
        if child.out_features in vocabularies and not any(path.startswith(f"{name}.") for name in lists):
            yield path


def _regions(styles: Mapping[str, str]) -> Iterator[str]:
    rows = [path for path, style in styles.items() if style in ("rowwise", "packed_rowwise")]
    for path, style in styles.items():
        parent = path.rpartition(".")[0]
        if style in ("colwise", "packed_colwise", "packed_qkv_colwise") and any(
            row.startswith(f"{parent}.") if parent else "." not in row for row in rows
        ):
            yield path
