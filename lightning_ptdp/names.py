"""Dotted names, as of modules and parameters: ``model.layers.3.mlp.up.weight``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_COMPILED = "._orig_mod"  # what `torch.compile` puts between a module and its own


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern, in which ``*`` stands for one part, is one of a dotted name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name.replace(_COMPILED, "")) is not None


def starred(name: str) -> str:
    """The pattern of a name and of those that differ from it in numbers: ``layers.3.up`` gives ``layers.*.up``."""
    return _NUMBER.sub("*", name)


def join(path: str, name: str) -> str:
    """The name of a child, below a path that is empty for the root."""
    return f"{path}.{name}" if path else name


def first_few(texts: Iterable[str], count: int = 4) -> str:
    """The first of some texts for a message, and how many there are besides: ``a, b and 7 more``."""
    texts = list(texts)
    shown = ", ".join(texts[:count])
    return shown if len(texts) <= count else f"{shown} and {len(texts) - count} more"
