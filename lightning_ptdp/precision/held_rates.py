"""Learning-rate schedules that stand still while updates are skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_ptdp.own_class import put_on

_HELD = "_ptdp_is_held"


def hold(scheduler: Any, was_skipped: Callable[[], bool]) -> None:
    """Let a scheduler's `step` do nothing after an update that was skipped.

    It gets a class of its own, once: an attribute would be saved with its state.
    """
    found: Any = type(scheduler)
    plain: Any = found.__base__ if getattr(found, _HELD, False) else found
    scheduler.__class__ = plain

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not was_skipped():
            plain.step(self, *args, **kwargs)

    put_on(scheduler, {"step": step, _HELD: True})
