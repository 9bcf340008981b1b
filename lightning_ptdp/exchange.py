"""After each step, what only the last stage knows reaches every rank: weights, losses and logged values.

Each replica's last stage describes its step by a schema (names, kinds) and numbers. Numbers of all replicas are merged,
schemas only where they differ, and the result goes down the pipeline. In the steady state that is one all-gather of one
number and one of a few over the replicas, and one broadcast along the pipeline.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ptdp.comm.collectives import all_gather_dim, broadcast_, broadcast_object, gather_objects
from lightning_ptdp.comm.groups import Groups

_HEAD = 6  # numbers before those of the logged values


@dataclass(frozen=True, slots=True)
class Key:
    """One logged name: how its values merge, and what `log` was called with.

    reduce: "mean", "sum", "min" or "max". is_synced: whether replicas merge.
    arguments: of the user's `log` call, sorted pairs. metric: name of the Metric object that was logged, else None.
    """

    name: str
    reduce: str
    is_synced: bool
    arguments: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    metric: str | None = None
    has_value: bool = True


@dataclass(frozen=True, slots=True)
class Logged:
    """One value of a key: of a microbatch, of a replica's batch, or of the whole batch.

    weight: what it counts in a mean. batch_size: samples behind it.
    """

    key: Key
    value: float
    weight: float
    batch_size: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step's result.

    weight: sum of the microbatches' weights. weighted_loss: sum of weight * loss. scale: see `BatchRun`.
    has_output: whether the step returned more than a loss. is_skipped: whether it returned None for everything.
    """

    weight: float
    weighted_loss: float
    scale: float
    num_samples: float
    has_output: bool
    logged: tuple[Logged, ...]
    is_skipped: bool = False

    @property
    def loss(self) -> float:
        """The mean over everything that counts; 0 where nothing does."""
        return self.weighted_loss / self.weight if self.weight else 0.0

    @property
    def factor(self) -> float:
        """What the gradients of the batch have still to be multiplied by; 0 where nothing counts."""
        return self.scale / self.weight if self.weight else 0.0


def merge(values: Sequence[Logged]) -> Logged:
    """One value for several of the same key, by the key's reduction.

    Those without samples do not count, nor does the mean of nothing (NaN, with weight 0).
    """
    real = [value for value in values if value.batch_size] or list(values)
    key, weight = real[0].key, sum(value.weight for value in real)
    if key.reduce == "mean":
        weighted = [value for value in real if value.weight]
        total = sum(value.value * value.weight for value in weighted) / weight if weighted else real[0].value
    elif key.reduce == "sum":
        total = sum(value.value for value in real if value.weight or not math.isnan(value.value))
    else:
        total = (min if key.reduce == "min" else max)(value.value for value in real)
    return Logged(key, total, weight, sum(value.batch_size for value in real))


class Exchange:
    """Shares the last stages' reports with all ranks."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._schema: tuple[Key, ...] = ()
        self._hash = _hash(())

    def share(self, mine: StepReport | None, *, joins_replicas: bool = True) -> StepReport:
        """The step's report on every rank: own scale, everything else merged over replicas as the keys say.

        mine: of this replica; None on ranks below the last stage. joins_replicas: False keeps to this replica, for
        steps of which replicas run different numbers.
        """
        merged = mine if mine is None or not joins_replicas else self._merge_replicas(mine)
        if self._groups.topology.pipeline_parallel_size == 1:
            assert merged is not None, "without a pipeline every rank is on the last stage"
            return merged
        return self._down_the_pipeline(merged)

    def _merge_replicas(self, mine: StepReport) -> StepReport:
        group = self._groups.data
        if group.size() == 1:
            return mine
        schema = tuple(value.key for value in mine.logged)
        hashes = all_gather_dim(torch.tensor([_hash(schema)]), group, 0, group.size()).tolist()
        if len(set(hashes)) == 1:
            numbers = torch.tensor([_numbers(mine)], dtype=torch.float64)
            rows = all_gather_dim(numbers, group, 0, group.size()).tolist()
            reports = [_report(row, schema) for row in rows]
        else:
            reports = gather_objects(mine, group)
        return _merge_reports(mine, reports)

    def _down_the_pipeline(self, merged: StepReport | None) -> StepReport:
        group, source = self._groups.pipeline, self._groups.pipeline_ranks[-1]
        head = torch.zeros(2, dtype=torch.int64)
        if merged is not None:
            schema = tuple(value.key for value in merged.logged)
            head = torch.tensor([_hash(schema), len(_numbers(merged))])
        else:
            schema = self._schema
        broadcast_(head, source, group)
        seen, count = head.tolist()
        if seen != self._hash:
            self._schema = broadcast_object(schema if merged is not None else None, source, group)
            self._hash = seen
        numbers = torch.zeros(count, dtype=torch.float64)
        if merged is not None:
            numbers = torch.tensor(_numbers(merged), dtype=torch.float64)
        return _report(broadcast_(numbers, source, group).tolist(), self._schema)


def _merge_reports(mine: StepReport, reports: Sequence[StepReport]) -> StepReport:
    values = []
    for own in mine.logged:
        if own.key.is_synced:
            values.append(merge([v for report in reports for v in report.logged if v.key == own.key]))
        else:
            values.append(own)
    seen = {own.key for own in mine.logged}
    for report in reports:  # what only other replicas logged
        for value in report.logged:
            if value.key.is_synced and value.key not in seen:
                seen.add(value.key)
                values.append(merge([v for other in reports for v in other.logged if v.key == value.key]))
    return StepReport(
        weight=sum(report.weight for report in reports),
        weighted_loss=sum(report.weighted_loss for report in reports),
        scale=mine.scale,
        num_samples=sum(report.num_samples for report in reports),
        has_output=mine.has_output,
        logged=tuple(values),
        is_skipped=all(report.is_skipped for report in reports),
    )


def _numbers(report: StepReport) -> list[float]:
    flags = [float(report.has_output), float(report.is_skipped)]
    numbers = [report.weight, report.weighted_loss, report.scale, report.num_samples, *flags]
    for value in report.logged:
        numbers += [value.value, value.weight, value.batch_size]
    return numbers


def _report(numbers: Sequence[float], schema: tuple[Key, ...]) -> StepReport:
    triples = [numbers[i : i + 3] for i in range(_HEAD, len(numbers), 3)]
    logged = tuple(Logged(key, *three) for key, three in zip(schema, triples, strict=True))
    weight, weighted_loss, scale, num_samples, has_output, is_skipped = numbers[:_HEAD]
    return StepReport(weight, weighted_loss, scale, num_samples, bool(has_output), logged, bool(is_skipped))


def _hash(schema: tuple[Key, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(schema).encode(), digest_size=7).digest())
