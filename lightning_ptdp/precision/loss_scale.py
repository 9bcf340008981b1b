"""The dynamic loss scale of float16 training (NVIDIA Apex; Megatron-LM's hysteresis).

Losses are multiplied by the scale before backward, so that small gradients do not vanish in float16, and gradients
divided by it afterwards. A step whose gradients are not finite is skipped, and the scale backs off; after enough good
steps it grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class LossScale:
    """A scale and how it changes; all ranks make the same decisions.

    Attributes:
        value: the scale.
        growth_factor: what the scale is multiplied by when it grows.
        growth_interval: it grows after so many good steps in a row.
        backoff_factor: what the scale is multiplied by when it backs off.
        minimum: it does not get smaller than this.
        hysteresis: since the last growth, so many bad steps must come until it backs off; it then does at each one.
        good_steps: good steps in a row, so far.
        patience: bad steps until it backs off.

    Raises:
        ValueError: the numbers make no sense.
    """

    value: float = 65536.0
    growth_factor: float = 2.0
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    minimum: float = 1.0
    hysteresis: int = 1
    good_steps: int = 0
    patience: int = -1

    def __post_init__(self) -> None:
        rules = {
            "minimum > 0": self.minimum > 0,
            "initial_scale >= minimum": self.value >= self.minimum,
            "growth_factor >= 1": self.growth_factor >= 1,
            "growth_interval >= 1": self.growth_interval >= 1,
            "0 < backoff_factor < 1": 0 < self.backoff_factor < 1,
            "hysteresis >= 1": self.hysteresis >= 1,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"a loss scale needs {' and '.join(broken)}; got {self}")
        if self.patience < 0:
            self.patience = self.hysteresis

    @property
    def is_lowest(self) -> bool:
        """Whether the scale cannot back off any more."""
        return self.value <= self.minimum

    def update(self, *, is_finite: bool) -> None:
        """Take note of a step, and change the scale if it is time."""
        if is_finite:
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.value *= self.growth_factor
                self.good_steps, self.patience = 0, self.hysteresis
            return
        self.good_steps = 0
        self.patience -= 1
        if self.patience <= 0:
            self.value = max(self.value * self.backoff_factor, self.minimum)
            self.patience = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: scale and counters."""
        return {"scale": self.value, "good_steps": self.good_steps, "patience": self.patience}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self.value, self.good_steps, self.patience = state["scale"], state["good_steps"], state["patience"]
