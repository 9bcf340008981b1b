"""Lets Lightning's callbacks see one model where each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)
from torch import nn

from lightning_ptdp.host.lightning import callbacks_of, has_restored_schedule, throughputs_of, unpin_summary
from lightning_ptdp.host.torch import BatchNorm
from lightning_ptdp.topology import Topology

WholeModel = Callable[[], AbstractContextManager[None]]

_DTYPES = {"64": torch.float64, "32": torch.float32, "bf": torch.bfloat16, "16": torch.float16}


def refused_callbacks(callbacks: Iterable[Callback], module: nn.Module, topology: Topology) -> list[str]:
    """Refuse callbacks that cannot give the result of one process; returns a sentence for each."""
    if topology.world_size == 1:
        return []
    is_split = topology.replica_size > 1
    has_batch_norm = any(isinstance(child, BatchNorm) for child in module.modules())
    return [
        fault
        for callback in callbacks
        if (fault := _fault(callback, is_split=is_split, has_batch_norm=has_batch_norm)) is not None
    ]


def refused_in_background(callbacks: Iterable[Callback], *, saves_files: bool) -> list[str]:
    """Refuse what async_checkpoint=True cannot do; returns a sentence for each.

    Args:
        callbacks: the Trainer's.
        saves_files: whether a checkpoint is one ordinary file, or goes through a CheckpointIO.
    """
    faults = []
    if saves_files:
        faults.append(
            "async_checkpoint=True writes folders beside training, and this run saves files "
            "(save_distributed_checkpoint=False, or a CheckpointIO of yours); leave one of them out"
        )
    if any(isinstance(callback, ModelCheckpoint) and callback.save_last == "link" for callback in callbacks):
        faults.append(
            'ModelCheckpoint(save_last="link") links to a checkpoint that async_checkpoint=True has not written yet; '
            'use filename="last-{step}" and save_top_k=1, which ckpt_path="last" finds, or save_last=True'
        )
    return faults


def _fault(callback: Callback, *, is_split: bool, has_batch_norm: bool) -> str | None:
    name = type(callback).__name__
    if isinstance(callback, BatchSizeFinder):
        return (
            f"{name} searches for the size at which memory runs out, which one rank alone would notice, and saves and "
            "loads files of other names on every rank; find the size in a run of one process, or by micro_batch_size, "
            "which alone decides how much memory a batch takes"
        )
    if is_split and isinstance(callback, ModelPruning):
        return (
            f"{name} compares weights of the whole model, and a rank holds a part of it; leave it out, or use "
            "tensor_parallel_size=1 and pipeline_parallel_size=1"
        )
    if is_split and has_batch_norm and isinstance(callback, StochasticWeightAveraging):
        return (
            f"{name} runs an epoch without backward to refresh batch norm, and a split model has none; use "
            "WeightAveraging(use_buffers=True), which averages the statistics, or tensor_parallel_size=1 and "
            "pipeline_parallel_size=1"
        )
    return None


def show_whole_model(callbacks: Iterable[Callback], whole_model: WholeModel) -> None:
    """Let finetuning callbacks freeze, unfreeze and group the parameters of the whole model."""
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            callback.on_train_epoch_start = _within(whole_model, callback)  # type: ignore[method-assign]


def _within(whole_model: WholeModel, callback: BaseFinetuning) -> Any:
    def on_train_epoch_start(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with whole_model():
            type(callback).on_train_epoch_start(callback, trainer, pl_module)

    return on_train_epoch_start


def release(callbacks: Iterable[Callback]) -> None:
    """Give callbacks back what `show_whole_model` and `pin_summaries` replaced."""
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            callback.__dict__.pop("on_train_epoch_start", None)
        elif isinstance(callback, ModelSummary):
            unpin_summary(callback)


def tell_restored(trainer: pl.Trainer, module: pl.LightningModule, whole_model: WholeModel) -> None:
    """Run `on_fit_start` again for callbacks that read their restored state in it: here it is restored after that."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, BaseFinetuning):
            with whole_model():
                callback.on_fit_start(trainer, module)
        elif isinstance(callback, Timer):
            callback.on_fit_start(trainer, module)
        elif isinstance(callback, StochasticWeightAveraging) and has_restored_schedule(callback):
            trainer.lr_scheduler_configs.clear()  # its own schedule follows, and is restored by itself


def count_replicas(callbacks: Iterable[Callback], topology: Topology, device: torch.device, precision: str) -> None:
    """Let throughput callbacks take a replica for a device: the ranks of one replica see the same samples.

    Args:
        callbacks: the Trainer's.
        topology: t * p devices are a replica.
        device: whose peak rate in FLOP/s is looked up.
        precision: as the Trainer spells it; the peak rate depends on it.
    """
    available = get_available_flops(device, _DTYPES[precision[:2]])
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor):
            callback.available_flops = None if available is None else available * topology.replica_size
            for throughput in throughputs_of(callback):
                throughput.world_size = topology.data_parallel_size
                throughput.available_flops = callback.available_flops
