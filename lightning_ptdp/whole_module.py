"""What must happen to a module while every rank still holds it whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn

from lightning_ptdp.callbacks import callbacks_of
from lightning_ptdp.comm.collectives import broadcast_
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.preflight import differing_items, gather_differing

_SUMMARIES = "_ptdp_summaries"
_CHUNK = 1 << 18  # elements that are summed at once, so that a big table needs no second copy

log = logging.getLogger(__name__)


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


def agree_on_weights(module: nn.Module, groups: Groups) -> None:
    """Give every rank the values of rank 0, where they differ: processes that drew other numbers built other weights.

    The ranks' modules must have the same parameters and buffers, as `preflight` sees to.
    """
    if groups.world.size() == 1:
        return
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        mine = {name: repr(_checksum(tensor)) for name, tensor in tensors.items()}
        differing = list(differing_items(gather_differing({"values": mine}, groups.world).get("values", ())))
        if not differing:
            return
        log.info(
            "initial values of %d tensors differ between ranks (%s, ...): those of rank 0 are taken",
            len(differing),
            differing[0],
        )
        for name in differing:
            broadcast_(tensors[name].data, 0, groups.world)


def _checksum(tensor: Tensor) -> float | None:
    """A number that differs where values do, near enough; None on the meta device."""
    if tensor.is_meta:
        return None
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    weights = torch.arange(1, _CHUNK + 1, dtype=torch.float64, device=tensor.device)
    for i, part in enumerate(tensor.detach().reshape(-1).split(_CHUNK)):
        total += (part.double() * weights[: len(part)]).sum() * (i % 8191 + 1)
    return float(total.nan_to_num(nan=-1.0))
