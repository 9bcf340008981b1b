"""What set-up makes of a module for one call of the Trainer's."""

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
    """A module, split, and who has to do with it.

    engine: runs its batches. steps: run the user's steps by the engine. whole_groups: of the optimizers. state: of
    module and optimizers, as checkpoints have it. resuming: keeps and restores random generators and loaders' places.
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
    """Split a module and make who has to do with it.

    Args:
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
