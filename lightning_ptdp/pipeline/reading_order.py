"""Where a module runs, read off the source of the forward that calls it and the blocks."""

from __future__ import annotations

import inspect
import re

from torch import nn


def assign_by_source(module: nn.Module, blocks: str, name: str) -> str | None:
    """ "first", "last" or "shared" by where the common parent's forward names a module, before or after the blocks.

    name, blocks: full names of the module and of the block list. None where the source does not tell.
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
    """The deepest module that holds both, and the next part of each name below it."""
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
