"""Tensor-parallel plans: name patterns -> style, and what they mean for a given module.

In a pattern ``*`` stands for one part of a dotted name. A pattern names a module, a bare parameter of one, or, for
`local_size`, an integer attribute of one. The styles themselves are rows of `styles.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import nn

from lightning_ptdp.names import join, matches, starred
from lightning_ptdp.tensor_parallel.styles import STYLES, find_style

T = TypeVar("T")

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


def find_plan(module: nn.Module) -> dict[str, str]:
    """The plans that a module and its children carry, joined under the names of the whole.

    From, in this order: an attribute `tensor_parallel_plan`, Hugging Face's `tp_plan`, our own table.
    """
    found: dict[str, str] = {}
    for path, child in module.named_modules():
        plan = _plan_of(child)
        for pattern, style in plan.items():
            found.setdefault(join(path, pattern), style)
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
                full = join(path, name)
                if inner is embedding and isinstance(inner, nn.Embedding) and match(plan, full) is None:
                    plan[full] = "embedding_rowwise"


def match(plan: Mapping[str, T], name: str) -> T | None:
    """What a plan says of a dotted name; an exact name counts before patterns."""
    if name in plan:
        return plan[name]
    return next((style for pattern, style in plan.items() if "*" in pattern and matches(pattern, name)), None)


def suggestion(module: nn.Module) -> str:
    """A plan to copy, of the module's linear layers, for a user who has none."""
    lines = []
    seen = set()
    for path, child in module.named_modules():
        if isinstance(child, nn.Linear | nn.Embedding):
            pattern = starred(path)
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
    unknown = {name: style for name, style in plan.items() if find_style(style) is None}
    if unknown:
        faults.append(f"the tensor-parallel plan has unknown styles {unknown}; known are {', '.join(STYLES)}")
    if is_given:
        names = set(_names(module))
        idle = [
            pattern
            for pattern, style in plan.items()
            if not any(matches(pattern, name) for name in names)
            and not (_divides_attribute(style) and attributes(module, pattern))
        ]
        if idle:
            near = sorted({starred(name) for name in names})
            faults.append(
                f"the tensor-parallel plan names {idle}, which match no module or parameter; there are {near}"
            )
    return faults


def _divides_attribute(name: str) -> bool:
    style = find_style(name)
    return style is not None and style.divides_attribute


def _names(module: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in module.named_modules())
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))


def attributes(module: nn.Module, pattern: str) -> list[str]:
    """Names of the integer attributes that a pattern matches."""
    parent, _, leaf = pattern.rpartition(".")
    return [
        join(path, leaf)
        for path, child in module.named_modules()
        if matches(parent, path) and isinstance(getattr(child, leaf, None), int)
    ]
