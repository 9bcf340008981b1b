"""States what this rank is about to run, in sections that `compare` compares with the other ranks."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.host.lightning import callbacks_of
from lightning_ptdp.layout import Layout, layout_of
from lightning_ptdp.preflight.compare import Section
from lightning_ptdp.topology import Topology

# Callbacks that act on all ranks together; others, such as a progress bar, a rank may have for itself.
_JOINT_CALLBACKS = (
    callbacks.BaseFinetuning,
    callbacks.BatchSizeFinder,
    callbacks.Checkpoint,
    callbacks.EarlyStopping,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.Timer,
)
_TRAINER_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "fast_dev_run",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
    "log_every_n_steps",
)
VERSION = metadata.version("lightning_ptdp")  # asked of the installed package: its __init__ is above this module
_PLAIN = (bool, int, float, str, type(None))


def versions() -> Section:
    """State the versions of what computes the numbers."""
    items = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "CUDA of torch": str(torch.version.cuda),
        "lightning": lightning.__version__,
        "torchmetrics": torchmetrics.__version__,
        "lightning_ptdp": VERSION,
    }
    return Section("versions", "all ranks must run the same versions", items, "install the same on every node")


def arguments(config: ParallelConfig, *, device: str, devices_per_node: int) -> Section:
    """State what the strategy was given, and what kind of devices it runs on."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given |= {"device": device, "devices_per_node": devices_per_node}
    return Section(
        "arguments",
        "all ranks must give PTDPStrategy the same arguments",
        {name: repr(value) for name, value in given.items()},
        "let no argument depend on the rank or the node",
    )


def sizes(topology: Topology | None) -> Section:
    """State the sizes, those that "auto" came to included; None if that waits for the module to be built."""
    items = {"sizes": "that wait for the module"}
    if topology is not None:
        items = {field.name: str(getattr(topology, field.name)) for field in dataclasses.fields(topology)}
    return Section(
        "sizes",
        'all ranks must choose the same sizes where they are "auto"',
        items,
        "give tensor_parallel_size and pipeline_parallel_size as numbers (devices of unlike memory choose unlike), and "
        "build the same module everywhere",
        explained_by=frozenset({"arguments", "versions"}),
    )


def trainer_settings(trainer: pl.Trainer) -> Section:
    """State those settings of the Trainer that change what is computed, or when ranks meet."""
    own = callbacks_of(trainer)
    items = {name: repr(getattr(trainer, name)) for name in _TRAINER_SETTINGS}
    items["precision"] = str(trainer.precision)
    joint = [callback.state_key for callback in own if isinstance(callback, _JOINT_CALLBACKS)]
    items |= {f"callback {key}": f"{joint.count(key)} times" for key in joint}
    return Section(
        "trainer",
        "all ranks must give the Trainer the same settings",
        items,
        "let no setting or callback depend on the rank",
    )


def module_contents(module: pl.LightningModule, operations: str | None = None) -> Section:
    """State the parameters and buffers of the whole module.

    Those of a module that an earlier run has split were compared then, and are left out.

    Args:
        module: the user's.
        operations: a hash of the operations that will give the tensors their values, if those were put off.
    """
    items = {"automatic_optimization": str(module.automatic_optimization)}
    if operations is not None:
        items["operations of configure_model"] = operations
    if layout_of(module) is not None:
        items["module"] = "that an earlier run split"
    else:
        first_names: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(parameter, name)
            tied = "" if first == name else f", tied to {first!r}"
            trained = "trained" if parameter.requires_grad else "frozen"
            items[f"parameter {name!r}"] = f"{_kind(parameter)}, {trained}{tied}"
        for name, buffer in module.named_buffers(remove_duplicate=False):
            items[f"buffer {name!r}"] = _kind(buffer)
    return Section(
        "module",
        "all ranks must build the same module",
        items,
        "build it from the same arguments on every rank, and freeze alike",
    )


def layout_of_ranks(layout: Layout) -> Section:
    """State which stage runs what."""
    fields = dataclasses.fields(layout.partition)
    items = {"num_stages": str(layout.num_stages)}
    items |= {field.name: repr(getattr(layout.partition, field.name)) for field in fields}
    return Section(
        "layout",
        "all ranks must cut the module into the same stages",
        items,
        "give pipeline_blocks, pipeline_split, first, last and shared by hand",
        explained_by=frozenset({"module", "versions"}),
    )


def tensor_parallel_plan(layout: Layout) -> Section:
    """State how each layer is split over tensor peers."""
    placement = layout.placement
    items = {f"style of {name!r}": style for name, style in placement.styles.items()}
    items |= {f"shard of {name!r}": repr(shard) for name, shard in placement.shards.items()}
    items |= {f"summed gradient of {name!r}": "" for name in sorted(placement.summed)}
    items |= {"divided sizes": repr(placement.sizes), "heads": repr(sorted(placement.heads))}
    items["blocks on parts of the sequence"] = repr(placement.sequence_blocks)
    return Section(
        "plan",
        "all ranks must split the layers by the same tensor-parallel plan",
        items,
        "carry the same plan on every rank, or pass it as tensor_parallel_plan=",
        explained_by=frozenset({"module", "versions"}),
    )


def optimization(
    optimizers: Sequence[Optimizer], names: Sequence[Sequence[Sequence[str]]], schedulers: Sequence[LRSchedulerConfig]
) -> Section:
    """State the optimizers, their groups and options, and the schedulers.

    Args:
        optimizers: what the user configured.
        names: for each optimizer, and each of its groups, the names of the parameters.
        schedulers: as Lightning keeps them.
    """
    items: dict[str, str] = {}
    for i, (optimizer, groups) in enumerate(zip(optimizers, names, strict=True)):
        items[f"optimizer {i}"] = type(optimizer).__name__
        for j, (group, members) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            where = f"of group {j} of optimizer {i}"
            items |= {f"option {key!r} {where}": _in_words(v) for key, v in group.items() if key != "params"}
            items |= {f"place of {name!r} in optimizer {i}": f"group {j}, number {k}" for k, name in enumerate(members)}
    for i, each in enumerate(schedulers):
        settings = {f.name: getattr(each, f.name) for f in dataclasses.fields(each) if f.name != "scheduler"}
        items[f"scheduler {i}"] = f"{type(each.scheduler).__name__} {settings}"
    return Section(
        "optimizers",
        "all ranks must configure the same optimizers",
        items,
        "let configure_optimizers not depend on the rank",
    )


def _kind(tensor: Tensor) -> str:
    """Write the shape and dtype of a tensor."""
    return "without a shape" if is_lazy(tensor) else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _in_words(value: Any) -> str:
    """Write an option of an optimizer so that ranks can compare it.

    It may be a tensor of one number; or an object, whose own text may name its address in this process.
    """
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() <= 4 else list(value.shape)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_in_words, value))})"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
