"""What all ranks agree on before anything is changed: sizes, then the module's layout, then its optimizers.

Each step compares with the other ranks what this one is about to do, and gives every rank the faults of all, so that
all of them raise together and none waits in a collective for one that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_ptdp.callbacks.averages import refused_averages
from lightning_ptdp.callbacks.users import refused_callbacks, refused_in_background
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.deferred_init import DeferredInit
from lightning_ptdp.host.lightning import callbacks_of
from lightning_ptdp.layout import Layout, choose_model_parallel, lay_out, layout_of
from lightning_ptdp.preflight import inventory
from lightning_ptdp.preflight.compare import Findings, compare
from lightning_ptdp.preflight.refusals import (
    foreign_parameters,
    refused_manual_optimization,
    refused_modules,
    refused_optimizers,
)
from lightning_ptdp.schedule import SCHEDULES
from lightning_ptdp.topology import Topology


@dataclass(frozen=True)
class Machine:
    """The processes and devices of a run.

    Attributes:
        world: all processes of the run.
        device: "cpu" or "cuda".
        devices_per_node: ranks on each node.
        device_bytes: memory that a rank may count on.
    """

    world: ProcessGroup
    device: str
    devices_per_node: int
    device_bytes: int


@dataclass(frozen=True)
class Asked:
    """What a run was asked for, besides its Trainer's settings.

    Attributes:
        config: the strategy's arguments.
        has_own_io: whether the user gave a plug-in that writes checkpoints.
        has_main_weights: whether 16-bit weights are stepped as copies in float32.
    """

    config: ParallelConfig
    has_own_io: bool
    has_main_weights: bool


@dataclass(frozen=True)
class Sizes:
    """What `settle_sizes` found.

    Attributes:
        topology: the sizes; None if they wait for the module to be built.
        findings: what is wrong so far on any rank.
    """

    topology: Topology | None
    findings: Findings


def settle_sizes(
    trainer: pl.Trainer, module: pl.LightningModule, asked: Asked, machine: Machine, *, is_built: bool
) -> Sizes:
    """Choose the sizes that were left to "auto", and compare with the other ranks what was asked for.

    Nothing is raised yet: `settle_layout` raises these faults with those of the module.

    Args:
        trainer: of the run.
        module: the user's.
        asked: what the strategy was given.
        machine: the processes and devices.
        is_built: whether the module has its layers already; `configure_model` may build them later.
    """
    config, world_size = asked.config, machine.world.size()
    faults = config.faults(SCHEDULES)
    if config.async_checkpoint:
        saves_files = asked.has_own_io or not config.save_distributed_checkpoint
        faults += refused_in_background(callbacks_of(trainer), saves_files=saves_files)
    is_fixed = "auto" not in (config.tensor_parallel_size, config.pipeline_parallel_size)
    topology = None
    if faults or is_fixed or is_built:
        choice = () if faults else (_model_parallel(module, config, machine),)
        topology, more = config.resolve(world_size, *choice)
        faults += [fault for fault in more if fault not in faults]
    sections = [
        inventory.versions(),
        inventory.arguments(config, device=machine.device, devices_per_node=machine.devices_per_node),
        inventory.sizes(topology),
        inventory.trainer_settings(trainer),
    ]
    return Sizes(topology, compare(sections, faults, machine.world))


def settle_layout(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    asked: Asked,
    sizes: Sizes,
    deferred: DeferredInit | None,
    world: ProcessGroup,
) -> Layout:
    """Work out the layout of a module that every rank still holds whole, or holds without values.

    Args:
        trainer: of the run.
        module: the user's, built.
        asked: what the strategy was given.
        sizes: what `settle_sizes` returned.
        deferred: knows the values of a module that was built without any; None if it has its values.
        world: all ranks.

    Raises:
        ValueError: on every rank, with all faults of the configuration and the module.
    """
    config = asked.config
    topology = sizes.topology or config.resolve(world.size())[0]
    shards, has_main_weights = config.distributed_optimizer, asked.has_main_weights
    faults = [
        *sizes.findings.faults,
        *refused_callbacks(callbacks_of(trainer), module, topology),
        *refused_modules(module, topology, trains=trainer.state.fn == TrainerFn.FITTING),
        *refused_manual_optimization(module, shards=shards, has_main_weights=has_main_weights),
        *refused_averages(callbacks_of(trainer), shards=shards, has_main_weights=has_main_weights),
        *([] if deferred is None else deferred.faults(module)),
    ]
    layout, more = lay_out(module, config, topology)
    sections = [inventory.module_contents(module, None if deferred is None else deferred.digest)]
    if not sizes.findings.faults:
        sections += [inventory.layout_of_ranks(layout), inventory.tensor_parallel_plan(layout)]
    compare(sections, faults + more, world).refuse()
    return layout


def settle_optimizers(
    module: pl.LightningModule,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRSchedulerConfig],
    topology: Topology,
    world: ProcessGroup,
    *,
    shards: bool,
) -> None:
    """See to it that all ranks have the same optimizers, and that these can step a part of the model.

    Args:
        module: the user's, whose `named_parameters` are those of the whole model at this time.
        optimizers: what it configured.
        schedulers: of learning rates, likewise.
        topology: the sizes.
        world: all ranks.
        shards: whether each replica steps pieces of parameters (distributed_optimizer).

    Raises:
        ValueError: on every rank, where ranks have other optimizers, or optimizers cannot be split.
    """
    names = {parameter: name for name, parameter in reversed(list(module.named_parameters()))}
    held = [[[names.get(p, "") for p in group["params"]] for group in o.param_groups] for o in optimizers]
    faults = foreign_parameters(module, optimizers) + refused_optimizers(optimizers, topology, shards=shards)
    compare([inventory.optimization(optimizers, held, schedulers)], faults, world).refuse()


def _model_parallel(module: pl.LightningModule, config: ParallelConfig, machine: Machine) -> tuple[int, int]:
    """Choose (t, p) for sizes left to "auto"; those of an earlier run if that has split the module."""
    known = layout_of(module)
    if known is not None:
        return known.topology.tensor_parallel_size, known.topology.pipeline_parallel_size
    return choose_model_parallel(
        module,
        config,
        world_size=machine.world.size(),
        devices_per_node=machine.devices_per_node,
        device_bytes=machine.device_bytes,
    )
