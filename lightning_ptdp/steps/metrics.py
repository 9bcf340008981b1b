"""Lets torchmetrics objects in a module, which the last stage updates, compute alike on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ptdp.comm.collectives import broadcast_object
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.engine.outputs import packed, unpacked
from lightning_ptdp.host.torchmetrics import never_sync, set_update_count

_PLAIN = "_ptdp_plain_compute"


def connect_metrics(module: nn.Module, groups: Groups, is_in_step: Callable[[], bool], device: torch.device) -> None:
    """Make each metric sync over the replicas, and take the last stage's state before it computes.

    Outside a step every rank computes the same metrics in the same order. (An epoch-end hook would be too late:
    Lightning computes logged metrics before those.)
    """
    for metric in sync_over_replicas(module, groups):
        if groups.topology.pipeline_parallel_size > 1:
            plain = metric.__dict__.setdefault(_PLAIN, metric.compute)
            metric.compute = _compute_everywhere(metric, plain, groups, is_in_step, device)  # type: ignore[method-assign]


def sync_over_replicas(module: nn.Module, groups: Groups) -> list[Metric]:
    """Make metrics sync over the replicas when they compute, and never within a step; returns them."""
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    for metric in metrics:
        metric.process_group = groups.data
        if metric.dist_sync_on_step:
            metric.dist_sync_on_step = False
            rank_zero_warn(
                f"{type(metric).__name__}(dist_sync_on_step=True): a step's value stays the replica's own, because "
                "replicas may run different numbers of microbatches; the value of an epoch is that of all replicas"
            )
    return metrics


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
                mine = packed(metric.metric_state), metric.update_count
            state, count = broadcast_object(mine, groups.pipeline_ranks[-1], groups.pipeline)
            if not groups.is_last_pipeline_rank:
                for name, value in unpacked(state, device).items():
                    setattr(metric, name, value)
                set_update_count(metric, count)
        return plain(*args, **kwargs)

    return compute


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.clone()  # most metrics add to their tensors in place


@contextmanager
def frozen_metrics(module: nn.Module) -> Iterator[None]:
    """Let metrics be updated within the context, and put them back where they stood afterwards.

    They still know that they were updated, so that a replica without samples of its own computes what others have.
    """
    before = {
        metric: ({name: _copy(value) for name, value in metric.metric_state.items()}, metric.update_count)
        for metric in module.modules()
        if isinstance(metric, Metric)
    }
    try:
        yield
    finally:
        for metric, (state, count) in before.items():
            for name, value in state.items():
                setattr(metric, name, value)
            set_update_count(metric, max(count, min(metric.update_count, 1)))


class StepMetrics:
    """Knows the values of metrics over a whole step, whose microbatches each update them.

    A value of the step is not the mean of the values of its microbatches (think of precision, or of a median). So each
    metric has a twin that sees what the metric's forward sees, and forgets it when the next step begins.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names, self._twins, self._handles = {}, {}, []
        self._seen: set[str] = set()
        self._counts = False
        for name, metric in module.named_modules():
            if isinstance(metric, Metric):
                self._names[id(metric)], self._twins[name] = name, _twin(metric)
                self._handles.append(metric.register_forward_hook(self._follow, with_kwargs=True))

    def close(self) -> None:
        """Follow the metrics no longer."""
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        """Forget the step before."""
        for name in self._seen:
            self._twins[name].reset()
        self._seen.clear()

    @contextmanager
    def microbatch(self, *, counts: bool) -> Iterator[None]:
        """Follow metrics within the context, if the microbatch counts as a part of its step."""
        self._counts = counts
        try:
            yield
        finally:
            self._counts = False

    def value(self, name: str, default: Tensor) -> Tensor:
        """The value of a metric over the microbatches that its forward saw in this step; `default` if it saw none."""
        if name not in self._seen:
            return default
        value: Tensor = self._twins[name].compute()
        return value

    def _follow(self, metric: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        name = self._names.get(id(metric))
        if self._counts and name is not None:
            self._seen.add(name)
            self._twins[name].update(*args, **kwargs)


def _twin(metric: Metric) -> Metric:
    """Copy a metric; the copy, and the metrics in it, compute from their own state without a collective."""
    group = metric.process_group
    twin = copy.deepcopy(metric, {} if group is None else {id(group): None})  # a group cannot be copied
    for part in twin.modules():
        if isinstance(part, Metric):
            never_sync(part)
    twin.reset()
    return twin
