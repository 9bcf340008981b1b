"""torchmetrics objects in a module: updated on the last stage, computed alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_ptdp.comm.collectives import broadcast_object
from lightning_ptdp.comm.groups import Groups

_PLAIN = "_ptdp_plain_compute"


def connect_metrics(module: nn.Module, groups: Groups, is_in_step: Callable[[], bool], device: torch.device) -> None:
    """Make each metric sync over the replicas, and take the last stage's state before it computes.

    Outside a step every rank computes the same metrics in the same order. (An epoch-end hook would be too late:
    Lightning computes logged metrics before those.)
    """
    for metric in module.modules():
        if not isinstance(metric, Metric):
            continue
        metric.process_group = groups.data
        if groups.topology.pipeline_parallel_size > 1:
            plain = metric.__dict__.setdefault(_PLAIN, metric.compute)
            metric.compute = _compute_everywhere(metric, plain, groups, is_in_step, device)  # type: ignore[method-assign]


def _compute_everywhere(
    metric: Metric,
    plain: Callable[..., Any],
    groups: Groups,
    is_in_step: Callable[[], bool],
    device: torch.device,
) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        if not is_in_step():
            mine = None
            if groups.is_last_pipeline_rank:
                mine = metric.metric_state, metric._update_count
            state, count = broadcast_object(mine, groups.pipeline_ranks[-1], groups.pipeline)
            if not groups.is_last_pipeline_rank:
                for name, value in state.items():
                    setattr(metric, name, _to(value, device))
                metric._update_count, metric._computed = count, None
        return plain(*args, **kwargs)

    return compute


def _to(value: Any, device: torch.device) -> Any:
    return [item.to(device) for item in value] if isinstance(value, list) else value.to(device)


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.clone()  # most metrics add to their tensors in place


@contextmanager
def frozen_metrics(module: nn.Module) -> Iterator[None]:
    """Within, metrics may be updated; afterwards they stand where they stood.

    Only that they were updated stays known: a replica without samples of its own computes what the others have.
    """
    before = {
        metric: ({name: _copy(value) for name, value in metric.metric_state.items()}, metric._update_count)
        for metric in module.modules()
        if isinstance(metric, Metric)
    }
    try:
        yield
    finally:
        for metric, (state, count) in before.items():
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = max(count, min(metric._update_count, 1)), None
