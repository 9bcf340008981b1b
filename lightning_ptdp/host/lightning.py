"""Lightning's private names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.throughput import Throughput
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import (
    Callback,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch import nn
from torch.utils.data import DataLoader

SubprocessScriptLauncher = _SubprocessScriptLauncher
"""Starts the script again for every other rank of a node, as Lightning's own strategies do; it has no public name."""

Stateful = _Stateful
"""Has `state_dict` and `load_state_dict`: what Lightning asks of a loader whose position it saves."""


# -- trainer and module ------------------------------------------------------------------------------------------------


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """The Trainer's callbacks; the list itself. A connector sets it, so that the class does not declare it."""
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return found


def trainer_of(module: nn.Module) -> pl.Trainer | None:
    """The Trainer that a module is attached to; the public `trainer` raises where there is none."""
    return getattr(module, "_trainer", None)


def splits_samplers(trainer: pl.Trainer) -> bool:
    """The Trainer's argument `use_distributed_sampler`, which only its connector keeps."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def syncs_batch_norms(strategy: ParallelStrategy) -> bool:
    """The Trainer's argument `sync_batchnorm`, which only the strategy keeps, as what would carry it out."""
    return strategy._layer_sync is not None


def hook_in_progress(module: pl.LightningModule) -> str | None:
    """The hook that runs, by which Lightning decides what `self.log` means; nothing public tells it."""
    return module._current_fx_name


LATE_ATTRIBUTES = frozenset({"log", "_hparams", "_hparams_name", "_hparams_initial"})
"""Attributes that Lightning, or this package, gives a module after its construction: not its author's.

A new module shows what it is given in construction.
"""


class HooksPrecision(Precision):
    """A precision plug-in that is told when hooks and clipping are done with the gradients, right before a step.

    Lightning runs both in `_after_closure`, within the optimizer's step, and calls nothing public after it.
    """

    def hooks_are_done(self) -> None:
        """Called after `on_before_optimizer_step` and clipping."""
        raise NotImplementedError

    def end_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """Run these hooks, for a step that calls its closure itself."""
        self._after_closure(model, optimizer)

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        super()._after_closure(model, optimizer)
        self.hooks_are_done()


# -- loaders -----------------------------------------------------------------------------------------------------------

IndexBatchSampler = _IndexBatchSamplerWrapper
"""What Lightning wraps batch samplers in for prediction: it tells writers the samples of each batch."""


def wrapped_batches(sampler: IndexBatchSampler) -> Any:
    """What an `IndexBatchSampler` draws its batches from; nothing public tells it."""
    return sampler._batch_sampler


def wrap_batches(sampler: IndexBatchSampler, batches: Iterable[Any]) -> None:
    """Let an `IndexBatchSampler` draw from these batches."""
    sampler._batch_sampler = batches  # type: ignore[assignment]  # it only iterates, and asks for the length


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A loader for prediction that draws from another sampler.

    It is of the user's own class, made from the arguments that Lightning recorded; PyTorch sets no sampler afterwards.
    """
    return _update_dataloader(loader, sampler, mode=RunningStage.PREDICTING)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def average_of(callback: Callback) -> nn.Module | None:
    """The averaged copy of the module that an averaging callback keeps; None before it has made one.

    The callbacks put it into checkpoints, and give it to nobody.
    """
    if isinstance(callback, WeightAveraging):
        return None if callback._average_model is None else callback._average_model.module
    return callback._average_model if isinstance(callback, StochasticWeightAveraging) else None


def has_restored_schedule(callback: StochasticWeightAveraging) -> bool:
    """Whether the callback loaded a learning-rate schedule of its own from a checkpoint; it tells nobody."""
    return callback._scheduler_state is not None


def throughputs_of(callback: ThroughputMonitor) -> list[Throughput]:
    """The counters of a throughput callback, which took the number of devices for the number of replicas."""
    return list(callback._throughputs.values())


def summary_depth(callback: ModelSummary) -> int:
    """The argument `max_depth` of a summary callback, which keeps it to itself; 0 shows none."""
    return callback._max_depth


def summary_by(callback: ModelSummary, trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """The summary that the callback would show; `summarize` is public, and a callback may choose another."""
    return callback._summary(trainer, module)


def pin_summary(callback: ModelSummary, summary: KeptSummary) -> None:
    """Let the callback show this summary; it asks no public method for one."""
    callback._summary = lambda *_: summary  # type: ignore[method-assign,assignment]


def unpin_summary(callback: ModelSummary) -> None:
    """Take off what `pin_summary` put on."""
    callback.__dict__.pop("_summary", None)


class KeptSummary:
    """The numbers of a summary, without the module that it was worked out on; what summary callbacks ask of one."""

    def __init__(self, summary: Any) -> None:
        self._data = summary._get_summary_data()
        self.total_parameters = summary.total_parameters
        self.trainable_parameters = summary.trainable_parameters
        self.model_size = summary.model_size
        self.total_training_modes = summary.total_training_modes
        self.total_flops = summary.total_flops

    def _get_summary_data(self) -> Any:
        return self._data


# -- what it says ------------------------------------------------------------------------------------------------------

_ADVICE = (
    r"Using `DistributedSampler` with the dataloaders\.",  # which repeats samples in evaluation; ours does not
    r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable",
)
_ADVICE_TO_REPLICAS = r"It is recommended to use `self\.log\(.*sync_dist=True\)`"


def silence_advice(*, has_replicas: bool) -> None:
    """Drop, for the rest of the process, warnings of Lightning's that are not true of this strategy.

    Args:
        has_replicas: whether logged values may have to be reduced over replicas.
    """
    for message in _ADVICE if has_replicas else (*_ADVICE, _ADVICE_TO_REPLICAS):
        warnings.filterwarnings("ignore", message=message)
