"""Does the number of tensor peers divide the heads of an attention?

A head is known by an attribute of the module that holds the projections: the size of one (head_dim, ...), or their
number (num_heads, ...).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from lightning_ptdp.names import starred
from lightning_ptdp.tensor_parallel.linears import num_outputs
from lightning_ptdp.tensor_parallel.placement import Placement
from lightning_ptdp.tensor_parallel.styles import STYLES

_HEAD_SIZE_NAMES = ("head_dim", "head_size", "attention_head_size", "d_head", "d_k", "d_kv", "dim_head", "hd")
_HEAD_COUNT_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")


def check_heads(module: nn.Module, placement: Placement, size: int) -> list[str]:
    """Attention whose heads (or key-value heads) the number of peers does not divide, a sentence each.

    A head is known by an attribute of the module that holds the projections: the size of one (head_dim, ...), or their
    number (num_heads, ...).
    """
    faults: dict[str, str] = {}
    for path, name in placement.styles.items():
        style = STYLES.get(name)
        if style is None or not style.num_packed or path in placement.heads:
            continue
        parent = path.rpartition(".")[0]
        holder = module.get_submodule(parent)
        outputs = num_outputs(module.get_submodule(path))
        if outputs is None:
            continue
        heads = _num_heads(holder, path.rpartition(".")[2], outputs // style.num_packed)
        if heads is not None and heads % size:
            pattern = starred(path)
            faults.setdefault(
                pattern,
                f"tensor parallelism splits heads, so their number must be a multiple of tensor_parallel_size; "
                f"{path!r} has {heads} heads, and tensor_parallel_size={size}; use one of "
                f"{[i for i in range(1, heads + 1) if heads % i == 0]}, or leave {pattern!r} out of the plan",
            )
    return list(faults.values())


_ATTENTION_NAMES = re.compile(
    r"(^|_)(q|k|v|qkv|query|key|value|wq|wk|wv|w_q|w_k|w_v|c_attn|q_b|kv_b)(_|$)", re.IGNORECASE
)


_PACKED_NAMES = re.compile(r"qkv|query_key_value", re.IGNORECASE)


def _num_heads(holder: nn.Module, leaf: str, outputs: int) -> int | None:
    """How many heads a projection gives; None if it is no projection to heads, as far as names tell."""
    if not _ATTENTION_NAMES.search(leaf):
        return None
    size = _first_integer(holder, _HEAD_SIZE_NAMES)
    if size and outputs % size == 0:
        heads = outputs // size
        is_packed = _PACKED_NAMES.search(leaf) is not None and heads % 3 == 0
        return heads // 3 if is_packed else heads
    return _first_integer(holder, _HEAD_COUNT_NAMES)


def _first_integer(holder: nn.Module, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
