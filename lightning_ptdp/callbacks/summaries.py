"""Summary callbacks describe the whole module, not this rank's part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary

from lightning_ptdp.host.lightning import KeptSummary, callbacks_of, pin_summary, summary_by, summary_depth

_SUMMARIES = "_ptdp_summaries"


def pin_summaries(trainer: pl.Trainer, module: pl.LightningModule, *, is_whole: bool) -> bool:
    """Let summary callbacks describe the whole module, not this rank's part.

    Args:
        trainer: whose callbacks are meant.
        module: the user's.
        is_whole: False for a module that an earlier run has split. Its summaries are those that were worked out then,
            of the same depth if there is one.

    Returns:
        Whether there are summary callbacks that show anything.
    """
    known: dict[int, KeptSummary] = module.__dict__.setdefault(_SUMMARIES, {})
    active = [
        callback for callback in callbacks_of(trainer) if isinstance(callback, ModelSummary) and summary_depth(callback)
    ]
    for callback in active:
        if is_whole:
            with _runnable_or_silent(module):
                known[summary_depth(callback)] = KeptSummary(summary_by(callback, trainer, module))
        summary = known.get(summary_depth(callback), next(iter(known.values()), None))
        if summary is not None:
            pin_summary(callback, summary)
    return bool(active)


@contextmanager
def _runnable_or_silent(module: pl.LightningModule) -> Iterator[None]:
    """Take the example input from a module without values: a summary would run the module on it for layers' sizes."""
    example = module.example_input_array
    if any(parameter.is_meta for parameter in module.parameters()):
        module.example_input_array = None
    try:
        yield
    finally:
        module.example_input_array = example
