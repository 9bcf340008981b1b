"""Learning-rate schedules that stand still while updates are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HELD = "_ptdp_is_held"


def hold(scheduler: Any, was_skipped: Callable[[], bool]) -> None:
    """Let a scheduler's `step` do nothing after an update that was skipped.

    Its class is swapped for a subclass of the same name: an attribute of its own would be saved with its state.
    """
    found: Any = type(scheduler)
    plain: Any = found.__base__ if getattr(found, _HELD, False) else found

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not was_skipped():
            plain.step(self, *args, **kwargs)

    scheduler.__class__ = type(plain.__name__, (plain,), {"step": step, _HELD: True, "__module__": plain.__module__})
