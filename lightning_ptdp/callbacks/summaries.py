"""Summary callbacks describe the whole module, not this rank's part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary

from lightning_ptdp.callbacks.users import callbacks_of

_SUMMARIES = "_ptdp_summaries"


class _Summary:
    """A module's summary, worked out while the module was whole."""

    def __init__(self, summary: Any) -> None:
        self._data = summary._get_summary_data()
        self.total_parameters = summary.total_parameters
        self.trainable_parameters = summary.trainable_parameters
        self.model_size = summary.model_size
        self.total_training_modes = summary.total_training_modes
        self.total_flops = summary.total_flops

    def _get_summary_data(self) -> Any:
        return self._data


def pin_summaries(trainer: pl.Trainer, module: pl.LightningModule, *, is_whole: bool) -> bool:
    """Let summary callbacks describe the whole module, not this rank's part; returns whether there are any.

    is_whole: False for a module that an earlier run has split: its summary is the one that was worked out then, of the
    same depth where there was one.
    """
    known: dict[int, _Summary] = module.__dict__.setdefault(_SUMMARIES, {})
    active = [
        callback for callback in callbacks_of(trainer) if isinstance(callback, ModelSummary) and callback._max_depth
    ]
    for callback in active:
        if is_whole:
            with _runnable_or_silent(module):
                known[callback._max_depth] = _Summary(callback._summary(trainer, module))
        summary = known.get(callback._max_depth, next(iter(known.values()), None))
        if summary is not None:
            callback._summary = lambda *_, summary=summary: summary  # type: ignore[method-assign]
    return bool(active)


@contextmanager
def _runnable_or_silent(module: pl.LightningModule) -> Iterator[None]:
    """Within, a module without values has no example input, on which a summary would run it for the sizes of layers."""
    example = module.example_input_array
    if any(parameter.is_meta for parameter in module.parameters()):
        module.example_input_array = None
    try:
        yield
    finally:
        module.example_input_array = example
