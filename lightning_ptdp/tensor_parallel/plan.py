"""Tensor-parallel plans: name patterns -> style, and what they mean for a given module.

The vocabulary is Hugging Face's, plus a few of ours. In a pattern ``*`` stands for one part of a dotted name. A pattern
names a module, a bare parameter of one, or, for `local_size`, an integer attribute of one.

    style                            weight            forward
    colwise                          output dim        input whole, output split
    colwise_gather_output            output dim        output joined again
    rowwise                          input dim         input split, output summed; bias whole, added once
    rowwise_split_input              input dim         input whole, split first
    packed_colwise, packed_rowwise   two halves each   as colwise and rowwise, for gate and up in one matrix
    packed_qkv_colwise               by heads          as colwise, for query, key and value in one matrix
    embedding_rowwise                vocabulary        partial lookups summed
    embedding_colwise                hidden dim        pieces joined
    moe_tp_experts                   (by its own       hidden states and routing weights whole, output summed
                                     parameters)
    moe_identity_expert              -                 input divided by the number of peers, since outputs are summed
    mla_kv_a_proj                    whole             gradient of the rotary part summed
    replicated_with_grad_allreduce   whole             gradient summed: it is used on the rank's own heads
    local_params                     (by its own       the module reads its bare, split parameters
                                     parameters)
    all_reduce                       whole             output summed
    sequence_parallel                whole             used on a part of the sequence, where that is on
    replicate                        whole             as it is
    local_size                       -                 an integer attribute, divided by the number of peers
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_ptdp.tensor_parallel.shard import Shard

STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "packed_qkv_colwise",
    "embedding_rowwise",
    "embedding_colwise",
    "moe_tp_experts",
    "moe_identity_expert",
    "mla_kv_a_proj",
    "replicated_with_grad_allreduce",
    "local_params",
    "all_reduce",
    "sequence_parallel",
    "replicate",
    "local_size",
)

_OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}

# Models that carry no plan of their own, by class name of the module that holds the names.
_OWN_PLANS: dict[str, dict[str, str]] = {
    "GPT2Model": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "packed_qkv_colwise",
        "h.*.attn.split_size": "local_size",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "GPT2LMHeadModel": {"lm_head": "colwise_gather_output"},
}


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


def find_plan(module: nn.Module) -> dict[str, str]:
    """The plans that a module and its children carry, joined under the names of the whole.

    From, in this order: an attribute `tensor_parallel_plan`, Hugging Face's `tp_plan`, our own table.
    """
    found: dict[str, str] = {}
    for path, child in module.named_modules():
        plan = _plan_of(child)
        for pattern, style in plan.items():
            found.setdefault(f"{path}.{pattern}" if path else pattern, style)
    if found:
        _add_missing_embeddings(module, found)
    return found


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    own = getattr(module, "tensor_parallel_plan", None)
    if isinstance(own, Mapping):
        return own
    for base in type(module).__mro__:
        if base.__name__ in _OWN_PLANS:
            return _OWN_PLANS[base.__name__]
    hugging_face = getattr(module, "tp_plan", None)
    return hugging_face if isinstance(hugging_face, Mapping) else {}


def _add_missing_embeddings(module: nn.Module, plan: dict[str, str]) -> None:
    """Hugging Face splits the input embedding of a model with a plan by vocabulary, named in it or not."""
    for path, child in module.named_modules():
        if isinstance(getattr(child, "tp_plan", None), Mapping) and plan:
            embedding = child.get_input_embeddings() if callable(getattr(child, "get_input_embeddings", None)) else None
            for name, inner in child.named_modules():
                full = f"{path}.{name}" if path else name
                if inner is embedding and isinstance(inner, nn.Embedding) and match(plan, full) is None:
                    plan[full] = "embedding_rowwise"


def match(plan: Mapping[str, str], name: str) -> str | None:
    """The style for a dotted name; an exact name counts before patterns."""
    if name in plan:
        return plan[name]
    return next((style for pattern, style in plan.items() if "*" in pattern and _matches(pattern, name)), None)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def suggestion(module: nn.Module) -> str:
    """A plan to copy, of the module's linear layers, for a user who has none."""
    lines = []
    seen = set()
    for path, child in module.named_modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
            if pattern in seen:
                continue
            seen.add(pattern)
            if isinstance(child, nn.Embedding):
                style, size = "embedding_rowwise", f"{child.num_embeddings} x {child.embedding_dim}"
            else:
                style = "rowwise" if _looks_like_an_output(path) else "colwise"
                size = f"{child.in_features} -> {child.out_features}"
            lines.append(f'    "{pattern}": "{style}",  # {size}')
    return "{\n" + "\n".join(lines) + "\n}" if lines else "(the module holds no nn.Linear or nn.Embedding)"


_OUTPUT_WORDS = ("o", "o_proj", "out", "out_proj", "proj", "c_proj", "down", "down_proj", "fc2", "w2", "dense_4h_to_h")


def _looks_like_an_output(path: str) -> bool:
    return path.rpartition(".")[2] in _OUTPUT_WORDS


def check_plan(module: nn.Module, plan: Mapping[str, str], *, is_given: bool) -> list[str]:
    """What is wrong with a plan, a sentence each.

    is_given: whether the user wrote it; every pattern must then match something.
    """
    faults = []
    unknown = {name: style for name, style in plan.items() if _OTHER_NAMES.get(style, style) not in STYLES}
    if unknown:
        faults.append(f"the tensor-parallel plan has unknown styles {unknown}; known are {', '.join(STYLES)}")
    if is_given:
        names = set(_names(module))
        idle = [
            pattern
            for pattern, style in plan.items()
            if not any(_matches(pattern, name) for name in names)
            and not (style == "local_size" and _attributes(module, pattern))
        ]
        if idle:
            near = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names})
            faults.append(
                f"the tensor-parallel plan names {idle}, which match no module or parameter; there are {near}"
            )
    return faults


def _names(module: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in module.named_modules())
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))


def _attributes(module: nn.Module, pattern: str) -> list[str]:
    """Names of the integer attributes that a pattern matches."""
    parent, _, leaf = pattern.rpartition(".")
    return [
        f"{path}.{leaf}" if path else leaf
        for path, child in module.named_modules()
        if _matches(parent, path) and isinstance(getattr(child, leaf, None), int)
    ]


def place(module: nn.Module, plan: Mapping[str, str], size: int) -> tuple[Placement, list[str]]:
    """What a plan means for a module and `size` tensor peers, and what is wrong with that, a sentence each."""
    plan = {pattern: _OTHER_NAMES.get(style, style) for pattern, style in plan.items()}
    sizes = tuple(
        name for pattern, style in plan.items() if style == "local_size" for name in _attributes(module, pattern)
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
    """Styles on modules that they do not fit."""
    for path, style in styles.items():
        child = module.get_submodule(path)
        kind = type(child).__name__
        if style.startswith("embedding") and not isinstance(child, nn.Embedding):
            yield f"style {style!r} is for nn.Embedding, and {path!r} is a {kind}"
        elif style in _LINEAR_STYLES and any(True for _ in child.children()):
            yield (
                f"style {style!r} is for linear layers, and {path!r} ({kind}) holds modules of its own; name those "
                "instead"
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


# -- heads ---------------------------------------------------------------------------------------------------------

_HEAD_SIZE_NAMES = ("head_dim", "head_size", "attention_head_size", "d_head", "d_k", "d_kv", "dim_head", "hd")
_HEAD_COUNT_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")


def check_heads(module: nn.Module, placement: Placement, size: int) -> list[str]:
    """Attention whose heads (or key-value heads) the number of peers does not divide, a sentence each.

    A head is known by an attribute of the module that holds the projections: the size of one (head_dim, ...), or their
    number (num_heads, ...).
    """
    faults: dict[str, str] = {}
    for path, style in placement.styles.items():
        if style not in ("colwise", "packed_qkv_colwise") or path in placement.heads:
            continue
        linear = module.get_submodule(path)
        parent = path.rpartition(".")[0]
        holder = module.get_submodule(parent)
        outputs = _outputs(linear)
        if outputs is None:
            continue
        if style == "packed_qkv_colwise":
            outputs //= 3
        heads = _num_heads(holder, path.rpartition(".")[2], outputs)
        if heads is not None and heads % size:
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
            faults.setdefault(
                pattern,
                f"tensor parallelism splits heads, so their number must be a multiple of tensor_parallel_size; "
                f"{path!r} has {heads} heads, and tensor_parallel_size={size}; use one of "
                f"{[i for i in range(1, heads + 1) if heads % i == 0]}, or leave {pattern!r} out of the plan",
            )
    return list(faults.values())


def _outputs(linear: nn.Module) -> int | None:
    if isinstance(linear, nn.Linear):
        return linear.out_features
    return linear.get_parameter("weight").shape[1] if is_transposed(linear) else None


_ATTENTION_NAMES = re.compile(
    r"(^|_)(q|k|v|qkv|query|key|value|wq|wk|wv|w_q|w_k|w_v|c_attn|q_b|kv_b)(_|$)", re.IGNORECASE
)


def _num_heads(holder: nn.Module, leaf: str, outputs: int) -> int | None:
    """How many heads a projection gives; None if it is no projection to heads, as far as names tell."""
    if not _ATTENTION_NAMES.search(leaf):
        return None
    size = _first_integer(holder, _HEAD_SIZE_NAMES)
    if size and outputs % size == 0:
        return outputs // size
    return _first_integer(holder, _HEAD_COUNT_NAMES)


def _first_integer(holder: nn.Module, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
