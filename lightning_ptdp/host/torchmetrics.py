"""torchmetrics' private names: a metric's state as it travels over a pipeline, where public names only read."""

from __future__ import annotations

from typing import Any

from torchmetrics import Metric


def set_update_count(metric: Metric, count: int) -> None:
    """Say how often a metric was updated, and let it forget what it computed before.

    `Metric.update_count` only tells. Without a count a metric warns that it was never updated; with its old value it
    would not compute.
    """
    metric._update_count, metric._computed = count, None


def step_value(metric: Metric) -> Any:
    """What a metric's forward returned last, the value that Lightning logs for a step; None if it never ran."""
    return metric._forward_cache


def set_step_value(metric: Metric, value: Any) -> None:
    """Let Lightning log this for a step, on ranks where the metric's forward did not run."""
    metric._forward_cache = value


def never_sync(metric: Metric) -> None:
    """Let a metric compute from what it holds: `compute` asks a copy of `sync_on_compute`, from construction."""
    metric.sync_on_compute = metric._to_sync = False
