"""What a strategy sets up for one call of the Trainer's (fit, validate, ...): a split module, and what works on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import lightning.pytorch as pl
import torch

from lightning_ptdp.callbacks.loop_progress import LoopProgress
from lightning_ptdp.callbacks.resuming import Resuming
from lightning_ptdp.checkpoint.run_state import RunState
from lightning_ptdp.comm.failure import FailureBoard
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.deferred_init import DeferredInit
from lightning_ptdp.engine.engine import Engine, assemble
from lightning_ptdp.engine.parameter_groups import WholeGroups
from lightning_ptdp.layout import Layout
from lightning_ptdp.steps.exchange import Exchange
from lightning_ptdp.steps.steps import Steps


@dataclass(frozen=True)
class Run:
    """What works on a split module during one call of the Trainer's.

    Attributes:
        engine: runs batches through the module.
        steps: runs the user's steps by the engine, and merges what they return and log.
        whole_groups: knows the optimizers' groups of parameters as they are in the whole model.
        state: reads and writes the state of module and optimizers as checkpoints have it.
        resuming: saves and restores random generators and the positions of loaders.
    """

    engine: Engine
    steps: Steps
    whole_groups: WholeGroups
    state: RunState
    resuming: Resuming


def make_run(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    layout: Layout,
    config: ParallelConfig,
    groups: Groups,
    device: torch.device,
    *,
    seed: int,
    board: FailureBoard | None,
    progress: LoopProgress,
    deferred: DeferredInit | None,
    former: Run | None,
) -> Run:
    """Split a module, and make what works on it.

    Args:
        trainer: whose call it is.
        module: the user's.
        layout: how to split it.
        config: what the user asks for.
        groups: of this rank.
        device: of this rank.
        seed: of the run's random streams, the same on every rank.
        board: where ranks post the first failure.
        progress: knows the batch that the Trainer's loops are at.
        deferred: what knows the values of a module that was built without any.
        former: a fit whose optimizers this run does not step, and keeps for a checkpoint.
    """
    mains = None if former is None else former.engine.parameters.mains
    engine = assemble(module, layout, config, groups, device, seed=seed, deferred=deferred, mains=mains)
    parameters, gradients = engine.parameters, engine.gradients
    whole_groups = WholeGroups(
        parameters,
        gradients,
        shards=config.distributed_optimizer,
        former=None if former is None else former.whole_groups,
    )
    sizes = {**asdict(layout.topology), "virtual_pipeline_size": config.virtual_pipeline_size}
    return Run(
        engine=engine,
        steps=Steps(module, engine, Exchange(groups), board, progress),
        whole_groups=whole_groups,
        state=RunState(module, parameters, gradients, groups),
        resuming=Resuming(trainer, groups, device, sizes),
    )
