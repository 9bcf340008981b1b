"""Tells all ranks what only some know: weights, losses and logged values.

After each step, the last stage of each replica describes it by a schema (names, kinds) and numbers. Numbers of all
replicas are merged, schemas only where they differ, and the result goes to all ranks of the replica. In the steady
state that is one all-gather of one number and one of a few over the replicas, and two small broadcasts in the replica.

After a hook, which every rank runs for itself, ranks compare what they logged, and only where they differ say what.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_ptdp.comm.collectives import all_gather_dim, broadcast_, broadcast_object, gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.topology import Coordinate

_HEAD = 6  # so many numbers of a report come before those of the logged values


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a value cannot be logged, in a form that can travel.

    Attributes:
        kind: of the exception.
        message: its text.
        where: the line of the user's call.
    """

    kind: type[Exception]
    message: str
    where: str

    def error(self) -> Exception:
        """Make the exception, to raise."""
        error = self.kind(self.message)
        error.add_note(f"logged at {self.where}")
        return error


@dataclass(frozen=True, slots=True)
class Key:
    """One call of `log`: how its values merge, and what it was called with.

    Attributes:
        name: under which the value is logged.
        reduce: "mean", "sum", "min" or "max".
        is_synced: whether its values merge over the replicas (sync_dist=True).
        arguments: the user's other arguments to `log`, as sorted pairs.
        call: how many calls with this name came before in the step or hook.
        metric: the name of the Metric object that was logged, else None.
        refusal: why the call is an error, if it is.
        dtype: of the value. It may differ between calls that merge, and so may has_value.
        has_value: False for a Metric without a value of this step.
    """

    name: str
    reduce: str
    is_synced: bool
    arguments: tuple[tuple[str, Any], ...]
    call: int = 0
    metric: str | None = None
    refusal: Refusal | None = None
    dtype: torch.dtype = field(default=torch.float32, compare=False)
    has_value: bool = field(default=True, compare=False)

    @property
    def is_for_all(self) -> bool:
        """Whether every replica passes it to Lightning, also one that did not log it.

        Metric objects are among them: what computes one at the end of an epoch is a collective.
        """
        return self.is_synced or self.metric is not None or self.refusal is not None


@dataclass(frozen=True, slots=True)
class Logged:
    """The value of a key, over a microbatch, a replica's batch, or the whole batch.

    Attributes:
        key: the call of `log`.
        value: what was logged.
        weight: what the value counts in a mean.
        batch_size: how many samples it is about.
    """

    key: Key
    value: float
    weight: float
    batch_size: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of a step, on a replica or on all.

    Attributes:
        weight: sum of the microbatches' weights.
        weighted_loss: sum of weight * loss.
        scale: see `BatchRun`.
        num_samples: rows of the batch.
        has_output: whether the step returned more than a loss.
        logged: what it logged.
        is_skipped: whether it returned None for every microbatch.
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
        """The mean loss over everything that counts; 0 if nothing does."""
        return self.weighted_loss / self.weight if self.weight else 0.0

    @property
    def factor(self) -> float:
        """What the gradients of the batch have still to be multiplied by; 0 if nothing counts."""
        return self.scale / self.weight if self.weight else 0.0


def merge(values: Sequence[Logged]) -> Logged:
    """Merge values of one key into one, by the key's reduction.

    Values without samples are left out unless there are no others, and so is the mean of nothing (NaN, of weight 0).
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
    """Lets all ranks know what some report.

    Attributes:
        speaks: whether this rank reports for its replica: it is the first tensor rank of the last stage.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.speaks = groups.is_last_pipeline_rank and groups.at.tensor == 0
        last_stage = Coordinate(0, groups.at.data, groups.topology.pipeline_parallel_size - 1)
        self._speaker = groups.topology.rank(last_stage)
        self._schema: tuple[Key, ...] = ()
        self._hash = _hash(())

    def tell_all(self, mine: StepReport | None, *, joins_replicas: bool = True) -> StepReport:
        """Merge the reports of a step; every rank calls it.

        Args:
            mine: the replica's report, from the rank that `speaks` for it; others may give None.
            joins_replicas: False keeps to this replica, for steps of which replicas run different numbers.

        Returns:
            On every rank the replica's own scale, and everything else merged over the replicas as the keys say.
        """
        merged = None
        if self.speaks:
            assert mine is not None, "the last stage has a report"
            merged = self._merge_replicas(mine) if joins_replicas else mine
        return self._to_the_replica(merged)

    def agree(self, mine: tuple[Logged, ...]) -> tuple[Logged, ...]:
        """Agree on what a hook logged; all ranks must call this after the hook.

        Args:
            mine: what this rank logged in it.

        Returns:
            One value a key, in an order that all ranks share: of this rank if it has one, merged over the replicas if
            they are synced; else of another rank of the replica, or of another replica if every one has to log it.
        """
        groups, schema = self._groups, tuple(value.key for value in mine)
        size = groups.topology.world_size
        hashes = all_gather_dim(torch.tensor([_hash(schema)]), groups.world, 0, size).tolist()
        if len(set(hashes)) == 1 and not any(key.is_for_all for key in schema):
            return mine
        of_replicas = {hashes[rank] for rank in groups.topology.data_ranks(groups.at)}
        merged = _merge_values(mine, self._of_replicas(mine, alike=len(of_replicas) == 1))
        if len(set(hashes)) == 1:
            return merged
        known = {value.key: value for value in merged}
        ranks = groups.topology.replica_ranks(groups.at)
        by_rank = dict(zip(ranks, gather_objects(merged, groups.replica), strict=True))
        order = sorted(ranks, key=lambda rank: (-groups.topology.coordinate(rank).pipeline, rank))
        return tuple(known.get(value.key, value) for value in _first_of_each(by_rank[rank] for rank in order))

    def _of_replicas(self, mine: tuple[Logged, ...], *, alike: bool) -> list[tuple[Logged, ...]]:
        group = self._groups.data
        if not alike:
            return gather_objects(mine, group)
        if not mine:
            return [()] * group.size()
        row = torch.tensor([_flat(mine)], dtype=torch.float64)
        schema = tuple(value.key for value in mine)
        return [_logged(numbers, schema) for numbers in all_gather_dim(row, group, 0, group.size()).tolist()]

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

    def _to_the_replica(self, merged: StepReport | None) -> StepReport:
        group = self._groups.replica
        if group.size() == 1:
            assert merged is not None, "a lone rank has its own report"
            return merged
        head, schema = torch.zeros(2, dtype=torch.int64), self._schema
        if merged is not None:
            schema = tuple(value.key for value in merged.logged)
            head = torch.tensor([_hash(schema), len(_numbers(merged))])
        broadcast_(head, self._speaker, group)
        seen, count = head.tolist()
        if seen != self._hash:
            self._schema = broadcast_object(schema if merged is not None else None, self._speaker, group)
            self._hash = seen
        numbers = torch.zeros(count, dtype=torch.float64)
        if merged is not None:
            numbers = torch.tensor(_numbers(merged), dtype=torch.float64)
        return _report(broadcast_(numbers, self._speaker, group).tolist(), self._schema)


def _merge_reports(mine: StepReport, reports: Sequence[StepReport]) -> StepReport:
    return StepReport(
        weight=sum(report.weight for report in reports),
        weighted_loss=sum(report.weighted_loss for report in reports),
        scale=mine.scale,
        num_samples=sum(report.num_samples for report in reports),
        has_output=mine.has_output,
        logged=_merge_values(mine.logged, [report.logged for report in reports]),
        is_skipped=all(report.is_skipped for report in reports),
    )


def _merge_values(mine: tuple[Logged, ...], replicas: Sequence[tuple[Logged, ...]]) -> tuple[Logged, ...]:
    """Merge one replica's values with those of all replicas.

    The order is that in which the first replica that has a key logged it: every rank computes metrics in this order.
    """
    own = {value.key: value for value in mine}
    values = []
    for first in _first_of_each(replicas):
        key = first.key
        if key.is_synced:
            values.append(merge([value for logged in replicas for value in logged if value.key == key]))
        elif key in own:
            values.append(own[key])
        elif key.is_for_all:  # a metric without a value of this step here, or a refusal
            values.append(Logged(replace(key, has_value=False), math.nan, 0.0, 0.0))
    return tuple(values)


def _first_of_each(everyone: Iterable[tuple[Logged, ...]]) -> Iterable[Logged]:
    seen: dict[Key, Logged] = {}
    for logged in everyone:
        for value in logged:
            seen.setdefault(value.key, value)
    return seen.values()


def _flat(logged: tuple[Logged, ...]) -> list[float]:
    return [number for value in logged for number in (value.value, value.weight, value.batch_size)]


def _logged(numbers: Sequence[float], schema: tuple[Key, ...]) -> tuple[Logged, ...]:
    triples = [numbers[i : i + 3] for i in range(0, len(numbers), 3)]
    return tuple(Logged(key, *three) for key, three in zip(schema, triples, strict=True))


def _numbers(report: StepReport) -> list[float]:
    flags = [float(report.has_output), float(report.is_skipped)]
    head = [report.weight, report.weighted_loss, report.scale, report.num_samples, *flags]
    return head + _flat(report.logged)


def _report(numbers: Sequence[float], schema: tuple[Key, ...]) -> StepReport:
    weight, weighted_loss, scale, num_samples, has_output, is_skipped = numbers[:_HEAD]
    logged = _logged(numbers[_HEAD:], schema)
    return StepReport(weight, weighted_loss, scale, num_samples, bool(has_output), logged, bool(is_skipped))


def _hash(schema: tuple[Key, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(schema).encode(), digest_size=7).digest())
