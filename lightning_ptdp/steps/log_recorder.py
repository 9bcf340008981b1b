"""Records calls of `self.log` while a step runs under a schedule, and merges them, to be made once on every rank.

A step runs once a microbatch, and only the last stage's run reaches what follows the model. The calls recorded there
are merged over microbatches, told to all ranks (`exchange`), and passed to Lightning's own `log` on every rank, as if
the step had run once on the whole batch. Calls in hooks go to `hook_logs`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_ptdp.engine.outputs import numbers
from lightning_ptdp.recompute import is_recomputing
from lightning_ptdp.steps.exchange import Key, Logged, merge
from lightning_ptdp.steps.log_calls import LogCall, LogCalls
from lightning_ptdp.steps.metrics import StepMetrics

Outside = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], None]
"""Takes a call that is made outside of steps: name, value, and the other arguments."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A recorded call, the samples that it is about, and the number of its microbatch."""

    call: LogCall
    batch_size: float
    microbatch: int


class LogRecorder:
    """Stands in for a module's `log` within its steps."""

    def __init__(
        self, module: pl.LightningModule, calls: LogCalls, metrics: StepMetrics, outside: Outside | None = None
    ) -> None:
        """
        Args:
            module: the user's.
            calls: reads and makes its calls of `log`.
            metrics: know the values of metrics over a whole step.
            outside: takes calls outside of steps; None passes them to Lightning's own `log`.
        """
        self._module, self._calls, self._metrics, self._outside = module, calls, metrics, outside
        self._records: list[_Record] | None = None
        self._microbatch, self._num_samples = 0, 0
        self._seen: Counter[str] = Counter()

    def attach(self) -> None:
        """Take the module's calls of `log`."""
        self._module.__dict__["log"] = self._record

    def detach(self) -> None:
        """Give the module its own `log` back."""
        self._module.__dict__.pop("log", None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls within the context, which is that of a step."""
        self._records = []
        try:
            yield
        finally:
            self._records = None

    @contextmanager
    def microbatch(self, index: int, num_samples: int, *, keep: bool) -> Iterator[None]:
        """Take the calls within the context for those of a microbatch.

        Args:
            index: of the microbatch in its batch.
            num_samples: its rows.
            keep: whether this run of the step is the one whose calls count.
        """
        assert self._records is not None, "microbatches run within a recording"
        self._microbatch, self._num_samples = index, num_samples
        self._seen.clear()
        before = len(self._records)
        yield
        if not keep:
            del self._records[before:]

    def merged(self, weights: list[float], *, counts: bool = True) -> tuple[Logged, ...]:
        """Merge the calls of the step's microbatches: one value a key.

        Args:
            weights: of the microbatches' losses, by index.
            counts: whether the batch's samples count in means over an epoch.
        """
        assert self._records is not None, "called within the recording"
        by_key: dict[Key, list[_Record]] = {}
        for record in self._records:
            by_key.setdefault(record.call.key, []).append(record)
        values = [value for record in self._records if (value := self._value(record.call, by_key)) is not None]
        found = iter(numbers(values))
        logged: dict[Key, list[Logged]] = {}
        for record in self._records:
            key = record.call.key
            number = next(found) if record.call.value is not None else math.nan
            batch_size = record.batch_size if counts else 0.0
            logged.setdefault(key, []).append(Logged(key, number, weights[record.microbatch], batch_size))
        return tuple(merge(group) for group in logged.values())

    def _value(self, call: LogCall, by_key: dict[Key, list[_Record]]) -> Tensor | None:
        """The value that a call counts with: if microbatches logged a metric, that of the metric over all of them."""
        if call.value is None or call.key.metric is None or len(by_key[call.key]) == 1:
            return call.value
        return self._metrics.value(call.key.metric, default=call.value)

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if is_recomputing():
            return  # logged in the first forward
        if self._records is not None:
            call = self._calls.read(name, value, args, kwargs, call=self._seen[name])
            self._seen[name] += 1
            batch_size = self._num_samples if call.batch_size is None else call.batch_size
            self._records.append(_Record(call, float(batch_size), self._microbatch))
        elif self._outside is not None:
            self._outside(name, value, args, kwargs)
        else:
            self._calls.log(name, value, *args, **kwargs)
