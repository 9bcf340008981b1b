"""What a parallel forward is made from besides the module: where the module stands in the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Site:
    """Where a module that gets a parallel forward stands.

    root, path: the whole model, and the module's dotted name in it.
    weight_shape: of the module's weight before it was cut; () without one.
    opens_region: whether its split output goes on to a row-parallel layer of the same parent, so that random draws in
        between are a peer's own.
    is_on_sequence_part: whether it is in a block that runs on a peer's part of the sequence.
    """

    root: nn.Module
    path: str
    weight_shape: tuple[int, ...] = ()
    opens_region: bool = False
    is_on_sequence_part: bool = False

    def nearest(self, name: str) -> int | None:
        """An integer attribute of the nearest module around this one that has it, itself or in its `config`."""
        parts = self.path.split(".")
        for length in range(len(parts), -1, -1):
            holder = self.root.get_submodule(".".join(parts[:length]))
            for owner in (holder, getattr(holder, "config", None)):
                value = getattr(owner, name, None)
                if isinstance(value, int):
                    return value
        return None
