"""Turns calls of `self.log` into values that can wait, merge and travel, and makes the calls of Lightning's `log`."""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ptdp.host.torchmetrics import set_step_value, step_value
from lightning_ptdp.steps.exchange import Key, Logged, Refusal

ALREADY_SYNCED = "lightning_ptdp: merged over the replicas already"
"""Passed as `sync_dist_group`, so that Lightning does not reduce a value again."""

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}
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


@dataclass(frozen=True, slots=True)
class LogCall:
    """A call of `log`.

    Attributes:
        key: how its values merge, and what it was called with.
        value: a scalar tensor; None for a Metric without a value of this step.
        batch_size: as the user gave it, if so.
    """

    key: Key
    value: Tensor | None
    batch_size: float | None


class LogCalls:
    """Reads the calls of one module's `log`, and makes them.

    Attributes:
        log: the module's own, which its class defines.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self.log = types.MethodType(type(module).log, module)
        self._metric_names: dict[int, str] | None = None

    def read(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, call: int) -> LogCall:
        """Take down a call; the key of one that Lightning refuses holds the error.

        Args:
            name: the first argument of `log`.
            value: its second argument.
            args: what followed the value.
            kwargs: its keyword arguments.
            call: how many of this name came before in the step or hook.
        """
        given = named(args, kwargs)
        batch_size = given.pop("batch_size", None)
        given.pop("metric_attribute", None)
        try:
            reduce = _reduction(name, given.get("reduce_fx", "mean"))
            metric = self._name_of(name, value) if isinstance(value, Metric) else None
            shown = step_value(value) if isinstance(value, Metric) else value
            tensor = None if metric and shown is None else _scalar(name, shown)
            _check_arguments(name, given)
        except Exception as error:
            refusal = self._refusal(error, name, value, args, kwargs)
            return LogCall(Key(name, "mean", False, (), call, refusal=refusal, has_value=False), None, None)
        if "reduce_fx" in given:
            given["reduce_fx"] = reduce
        key = Key(
            name=name,
            reduce=reduce,
            is_synced=bool(given.get("sync_dist")) and not given.get("rank_zero_only") and metric is None,
            arguments=tuple(sorted(given.items())),
            call=call,
            metric=metric,
            dtype=torch.get_default_dtype() if tensor is None else tensor.dtype,
            has_value=tensor is not None,
        )
        return LogCall(key, tensor, None if batch_size is None else float(batch_size))

    def make(self, key: Key, value: Any, batch_size: int | None) -> None:
        """Call Lightning's own `log` with a value that ranks have merged, as the key says."""
        arguments = dict(key.arguments)
        if key.metric is not None:
            arguments["metric_attribute"] = key.metric
        elif key.is_synced:
            arguments["sync_dist_group"] = ALREADY_SYNCED
        self.log(key.name, value, **arguments, batch_size=batch_size)

    def replay(self, logged: Iterable[Logged], device: torch.device) -> None:
        """Pass merged values to Lightning's own `log`.

        Raises:
            Exception: one of the calls is an error, with the words that Lightning has for it.
        """
        for value in logged:
            key = value.key
            if key.refusal is not None:
                raise key.refusal.error()
            number = torch.tensor(value.value, dtype=key.dtype, device=device)
            if key.metric is not None:
                metric = self._module.get_submodule(key.metric)
                assert isinstance(metric, Metric), "found under this name when it was logged"
                set_step_value(metric, number if key.has_value else None)
                self.make(key, metric, round(value.batch_size))
            elif value.batch_size or key.reduce == "mean":  # else none of the batches here counts
                self.make(key, number, round(value.batch_size))

    def knows(self, metric: Metric) -> bool:
        """Whether a metric belongs to the module."""
        if self._metric_names is None:
            self._metric_names = {
                id(module): path for path, module in self._module.named_modules() if isinstance(module, Metric)
            }
        return id(metric) in self._metric_names

    def _name_of(self, name: str, metric: Metric) -> str:
        is_known = self.knows(metric)
        assert self._metric_names is not None, "made by knows"
        if not is_known:
            raise ValueError(
                f"`self.log({name!r}, metric)` was called with a Metric that is no attribute of the module; it has "
                f"{list(self._metric_names.values())}; set it as an attribute"
            )
        return self._metric_names[id(metric)]

    def _refusal(
        self, error: Exception, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Refusal:
        """Make a refusal of an error, in Lightning's words if it refuses the call, too."""
        try:
            self.log(name, value, *args, **kwargs)
        except Exception as lightnings:
            error = lightnings
        return Refusal(type(error), str(error), _line_of_user())


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of `log` that follow the value."""
    return dict(zip(_POSITIONAL, args, strict=False)) | dict(kwargs)


def _reduction(name: str, reduce_fx: Any) -> str:
    word = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if word not in _REDUCTIONS:
        raise ValueError(
            f"`self.log({name!r}, reduce_fx={reduce_fx!r})`: only min, max, mean and sum can be merged; for another "
            "reduction log a torchmetrics.Metric"
        )
    return _REDUCTIONS[word]


def _check_arguments(name: str, given: Mapping[str, Any]) -> None:
    """Refuse at the call what Lightning would refuse at the replay, since some replicas may have nothing to replay."""
    unknown = given.keys() - set(_POSITIONAL)
    if unknown:
        raise TypeError(f"`self.log({name!r}, ...)` got unexpected arguments {sorted(unknown)}")
    if given.get("on_step") is False and given.get("on_epoch") is False:
        raise ValueError(f"`self.log({name!r}, on_step=False, on_epoch=False)` is not useful")
    if given.get("add_dataloader_idx", True) and "/dataloader_idx_" in name:
        raise ValueError(f"`self.log({name!r}, ...)`: the index of the loader is appended to the name")
    if given.get("sync_dist_group") is not None:
        raise ValueError(
            f"`self.log({name!r}, sync_dist_group=...)` in a step: its values merge over the replicas, and over no "
            "other group; leave sync_dist_group out"
        )


def _scalar(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor | Number):
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
        )
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())
    if tensor.numel() != 1:
        raise ValueError(f"`self.log({name}, {value})` was called, but the tensor must have a single element")
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.reshape(()).clone()


def _line_of_user() -> str:
    """Find the line of user code that called into Lightning or us."""
    for frame in reversed(traceback.extract_stack()):
        folders = frame.filename.replace("\\", "/").split("/")
        if "lightning_ptdp" not in folders and "lightning" not in folders:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown line"
