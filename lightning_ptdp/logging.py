"""`self.log` under a schedule: recorded while a step runs, merged, and replayed once on every rank.

A step runs once a microbatch, and only the last stage's run reaches what follows the model. The calls recorded there
are merged over microbatches, shared (`exchange`), and passed to Lightning's own `log` on every rank, as if the step had
run once on the whole batch.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ptdp.exchange import Key, Logged, merge

ALREADY_SYNCED = "lightning_ptdp: merged over the replicas already"
"""Passed as `sync_dist_group`, so that Lightning does not reduce a value again."""

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


@dataclass(slots=True)
class _Record:
    key: Key
    value: Tensor | None
    batch_size: float
    microbatch: int


class LogRecorder:
    """Stands in for a module's `log`; outside a step it passes calls on."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._log = types.MethodType(type(module).log, module)
        self._records: list[_Record] | None = None
        self._microbatch, self._num_samples = 0, 0
        self._metric_names: dict[int, str] | None = None
        module.__dict__["log"] = self._record

    def detach(self) -> None:
        """Give the module its own `log` back."""
        self._module.__dict__.pop("log", None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, calls are recorded; they are dropped when a stage below the last ran them."""
        self._records = []
        try:
            yield
        finally:
            self._records = None

    @contextmanager
    def microbatch(self, index: int, num_samples: int, *, keep: bool) -> Iterator[None]:
        """Within, calls belong to this microbatch. keep: whether this run is the one that counts."""
        assert self._records is not None, "microbatches run within a recording"
        self._microbatch, self._num_samples = index, num_samples
        before = len(self._records)
        yield
        if not keep:
            del self._records[before:]

    def merged(self, weights: list[float], *, counts: bool = True) -> tuple[Logged, ...]:
        """One value a key over the microbatches of the step.

        weights: of the microbatches, by index. counts: whether the batch's samples do, in means over an epoch.
        """
        assert self._records is not None, "called within the recording"
        by_key: dict[Key, list[Logged]] = {}
        values = [record.value for record in self._records]
        numbers = _to_numbers([value for value in values if value is not None])
        for record in self._records:
            number = next(numbers) if record.value is not None else float("nan")
            batch_size = record.batch_size if counts else 0.0
            logged = Logged(record.key, number, weights[record.microbatch], batch_size)
            by_key.setdefault(record.key, []).append(logged)
        return tuple(merge(values) for values in by_key.values())

    def replay(self, logged: tuple[Logged, ...], device: torch.device) -> None:
        """Pass merged values to Lightning's own `log`."""
        for value in logged:
            key, arguments = value.key, dict(value.key.arguments)
            number = torch.tensor(value.value, dtype=key.dtype, device=device)
            shown: Any = number
            if key.metric is not None:
                shown = self._module.get_submodule(key.metric)
                assert isinstance(shown, Metric), "found under this name when it was logged"
                shown._forward_cache = number if key.has_value else None  # type: ignore[assignment]
                arguments["metric_attribute"] = key.metric
            elif key.is_synced:
                arguments["sync_dist_group"] = ALREADY_SYNCED
            elif not value.batch_size and key.reduce != "mean":
                continue  # a batch that does not count, of a replica that has no other left
            self._log(key.name, shown, **arguments, batch_size=round(value.batch_size))

    def _record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self._records is None:
            self._log(name, value, *args, **kwargs)
            return
        arguments = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        batch_size = arguments.pop("batch_size", None)
        metric = arguments.pop("metric_attribute", None)
        reduce = _reduction(name, arguments.get("reduce_fx", "mean"))
        if "reduce_fx" in arguments:
            arguments["reduce_fx"] = reduce
        shown: Any = value
        if isinstance(value, Metric):
            metric = metric or self._metric_name(name, value)
            shown = value._forward_cache
        elif isinstance(value, Tensor | Number):
            metric = None
        else:
            raise ValueError(
                f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
            )
        tensor = None if shown is None else _scalar(name, shown)
        key = Key(
            name=name,
            reduce=reduce,
            is_synced=bool(arguments.get("sync_dist")) and metric is None and not arguments.get("sync_dist_group"),
            arguments=tuple(sorted(arguments.items())),
            dtype=tensor.dtype if tensor is not None else torch.get_default_dtype(),
            metric=metric,
            has_value=tensor is not None,
        )
        self._records.append(_Record(key, tensor, float(batch_size or self._num_samples), self._microbatch))

    def _metric_name(self, name: str, metric: Metric) -> str:
        if self._metric_names is None:
            self._metric_names = {
                id(module): path for path, module in self._module.named_modules() if isinstance(module, Metric)
            }
        if id(metric) not in self._metric_names:
            raise ValueError(
                f"`self.log({name!r}, metric)` was called with a Metric that is no attribute of the module; it has "
                f"{list(self._metric_names.values())}; set it as an attribute, or pass metric_attribute="
            )
        return self._metric_names[id(metric)]


_POSITIONAL = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)


def _reduction(name: str, reduce_fx: Any) -> str:
    word = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if word not in _REDUCTIONS:
        raise ValueError(
            f"`self.log({name!r}, reduce_fx={reduce_fx!r})`: only min, max, mean and sum can be merged; for another "
            "reduction log a torchmetrics.Metric"
        )
    return _REDUCTIONS[word]


def _scalar(name: str, value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())
    if tensor.numel() != 1:
        raise ValueError(f"`self.log({name}, {value})` was called, but the tensor must have a single element")
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.reshape(()).clone()


def _to_numbers(tensors: list[Tensor]) -> Iterator[float]:
    """The values of scalar tensors, with one transfer for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.double())
    lists = {device: iter(torch.stack(members).tolist()) for device, members in by_device.items()}
    return iter([next(lists[tensor.device]) for tensor in tensors])
