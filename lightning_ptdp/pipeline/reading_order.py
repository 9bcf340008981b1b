"""Finds out where a module runs, from the source of the forward that calls it and the blocks."""

from __future__ import annotations

import inspect
import re

from torch import nn


def assign_by_source(module: nn.Module, blocks: str, name: str) -> str | None:
    """Read where a module runs: whether the forward of a common parent names it before or after the blocks.

    Args:
        module: the user's.
        blocks: full name of the block list.
        name: full name of the module in question.

    Returns:
        "first", "last", or "shared" if it is named both before and after; None if the source does not tell.
    """
    parent, inside, toward = _common(blocks, name)
    source = _source_of_forward(type(module.get_submodule(parent)))
    if source is None:
        return None
    cut = _mentions(source, toward)
    uses = _mentions(source, inside)
    if not cut or not uses:
        return None
    before, after = min(uses) < min(cut), max(uses) > max(cut)
    if before and after:
        return "shared"
    if before:
        return "first"
    return "last" if after else None


def _common(blocks: str, name: str) -> tuple[str, str, str]:
    """Split two names at the deepest module that holds both.

    Returns:
        Its name, and what follows it in `name` and in `blocks`, one part each.
    """
    a, b = blocks.split("."), name.split(".")
    depth = 0
    while depth < min(len(a), len(b)) - 1 and a[depth] == b[depth]:
        depth += 1
    return ".".join(a[:depth]), b[depth], a[depth]


def _source_of_forward(kind: type[nn.Module]) -> str | None:
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return None
    return re.sub(r"#.*", "", source)


def _mentions(source: str, attribute: str) -> list[int]:
    return [found.start() for found in re.finditer(rf"\bself\.{re.escape(attribute)}\b", source)]
