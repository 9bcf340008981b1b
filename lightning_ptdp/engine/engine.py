"""Runs batches on one rank: cuts them, follows the schedule, hands gradients on. `assemble` is the list of set-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.comm.collectives import MAX, all_reduce_, gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.comm.p2p import Messenger
from lightning_ptdp.comm.scatter_gather import ScatterGather
from lightning_ptdp.config import ParallelConfig, micro_batch_size
from lightning_ptdp.data_parallel import batch_norm
from lightning_ptdp.data_parallel.main_weights import MainWeights
from lightning_ptdp.data_parallel.moving_buffers import MovingBuffers
from lightning_ptdp.deferred_init import DeferredInit
from lightning_ptdp.engine.batch_run import (
    TRAINING,
    BatchRun,
    BatchStreams,
    EvaluationRun,
    TrainingRun,
    UserStep,
    Window,
)
from lightning_ptdp.engine.gradients import Gradients
from lightning_ptdp.engine.microbatches import Microbatch, num_samples, split
from lightning_ptdp.engine.parameters import Parameters
from lightning_ptdp.layout import Layout
from lightning_ptdp.pipeline.one_stage import Stages, stages_of
from lightning_ptdp.pipeline.runtime import Runtime
from lightning_ptdp.pipeline.stage import StageWorker
from lightning_ptdp.random_streams import RandomStreams
from lightning_ptdp.recompute import Beginning, Recomputation, install
from lightning_ptdp.schedule import Action, Program, Span, choose, generate, lower
from lightning_ptdp.tensor_parallel.convert import convert


def assemble(
    module: nn.Module,
    layout: Layout,
    config: ParallelConfig,
    groups: Groups,
    device: torch.device,
    *,
    seed: int,
    deferred: DeferredInit | None = None,
    mains: MainWeights | None = None,
    checks_agreement: bool = True,
) -> Engine:
    """Split a plain module and make what runs it; a module that an earlier run of the same layout split is taken over.

    The order matters: a shape twin of a converted module would call collectives.

    1. stages: twins of the plain module, then what other ranks own is hollow;
    2. tensor parallelism: what is owned is cut, and gets parallel forwards;
    3. values of what is owned, if they were put off;
    4. recomputation: planned blocks get forwards that run again in backward;
    5. the device: what is owned moves there.

    Then optimizers are configured on the whole tree, and `Gradients.bind` makes buffers for what they train.

    Args:
        device: where the rank computes.
        seed: of the run's random streams, the same on every rank.
        deferred: what knows the values of a module that was built without any.
        mains: what optimizers of an earlier run stepped.
        checks_agreement: whether tensor peers compare their first gradients.
    """
    indices = tuple(range(groups.at.pipeline, layout.num_stages, groups.topology.pipeline_parallel_size))
    placement = layout.placement
    beginnings: tuple[Beginning, ...] = ()
    if deferred is not None:
        deferred.make_hollow(module)
    stages = stages_of(module, layout.partition, indices, device)
    if groups.topology.tensor_parallel_size > 1:
        value_of = attrgetter("data") if deferred is None else deferred.take
        peers = convert(module, placement, groups.tensor, device, placement.sequence_blocks, value_of)
        beginnings = (peers.moment,)
    if deferred is not None:
        deferred.fill(module, stages.owns)
    recomputation = None
    if layout.recompute is not None:
        recomputation = install(module, layout.recompute, indices, device, beginnings)
    module.to(device)
    parameters = Parameters(module, stages, placement, groups, mains)
    return Engine(
        config,
        groups,
        device,
        stages,
        parameters,
        Gradients(parameters, groups, device, checks_agreement=checks_agreement),
        RandomStreams(seed, device),
        recomputation,
    )


class Engine:
    """Runs the batches of one module."""

    def __init__(
        self,
        config: ParallelConfig,
        groups: Groups,
        device: torch.device,
        stages: Stages,
        parameters: Parameters,
        gradients: Gradients,
        streams: RandomStreams,
        recomputation: Recomputation | None = None,
    ) -> None:
        """Take over what `assemble` made."""
        self.config, self.groups, self.device = config, groups, device
        self.parameters, self.gradients, self.streams = parameters, gradients, streams
        topology = groups.topology
        self._p, self._d = topology.pipeline_parallel_size, topology.data_parallel_size
        self._skeleton, self._recomputation = stages, recomputation
        self.num_stages = stages.partition.num_stages
        self.stages = tuple(range(groups.at.pipeline, self.num_stages, self._p))
        sends_parts = config.scatter_gather and not config.sequence_parallel
        has_both = min(topology.tensor_parallel_size, self._p) > 1
        self._scatter_gather = ScatterGather(groups.tensor, groups.replica) if sends_parts and has_both else None
        self._runtime = Runtime(
            Messenger(groups.pipeline, device, self._scatter_gather), groups.pipeline_ranks, groups.at.pipeline
        )
        self._moving: MovingBuffers | None = None
        self._restore_batch_norms: Callable[[], None] | None = None
        self._carries: tuple[bool, ...] = ()
        self._run: BatchRun | None = None

    # -- for training ------------------------------------------------------------------------------------------------

    def join_statistics(self, module: nn.Module, *, all_batch_norms: bool) -> None:
        """Let batch norms train on the samples of all replicas, and replicas follow the first in buffers that move.

        Args:
            module: on its device.
            all_batch_norms: whether all batch norms do, or torch's `SyncBatchNorm` alone.
        """
        group, first = self.groups.data, self.groups.topology.data_ranks(self.groups.at)[0]
        self._restore_batch_norms = batch_norm.synchronize(module, group, all_of_them=all_batch_norms)
        self._moving = MovingBuffers(module, group, first)

    def remark_on_recomputation(self) -> str | None:
        """What the first batch showed of it that a user should know, once."""
        return None if self._recomputation is None else self._recomputation.remark()

    def close(self) -> None:
        """Give the module back what was its own, but not the parts of other ranks."""
        self.gradients.release()
        if self._restore_batch_norms is not None:
            self._restore_batch_norms()
            self._restore_batch_norms = None
        if self._recomputation is not None:
            self._recomputation.undo()
            self._recomputation = None

    # -- a batch -----------------------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.stages[-1] == self.num_stages - 1

    def train(self, batch: Any, step: UserStep, backward: Callable[[Tensor], None], window: Window) -> TrainingRun:
        """Run forward and backward of a replica's batch; gradients wait in the buffers for `Gradients.settle`.

        Args:
            step: runs the user's step on a microbatch.
            backward: runs backward from a scalar.
        """
        rows = num_samples(batch)
        size = micro_batch_size(self.config.micro_batch_size, rows, self._p) if rows else 1
        microbatches = split(batch, size)
        run = TrainingRun(
            microbatches,
            step,
            self._streams_of(TrainingRun.phase, window.number, len(microbatches)),
            num_stages=self.num_stages,
            backward=backward,
            num_replicas=self._d,
            accumulate=window.accumulate,
            joins_replicas=self._restore_batch_norms is not None,
            device=self.device,
        )
        with self.gradients.collect():
            self._follow(run, self._schedule_of_training(), trains=True)
        return run

    def evaluate(self, batch: Any, step: UserStep, *, number: int, size: int | None) -> EvaluationRun:
        """Run the forward of a batch, whole or in microbatches of `size`."""
        microbatches = [Microbatch(0, batch, num_samples(batch))] if size is None else split(batch, size)
        streams = self._streams_of(EvaluationRun.phase, number, len(microbatches))
        run = EvaluationRun(microbatches, step, streams, num_stages=self.num_stages)
        self._follow(run, "forward_only", trains=False)
        return run

    def run_manual(self, step: Callable[[], Any], *, number: int) -> Any:
        """Run a step that does its own backward, on a whole module; its random streams are named as others' are."""
        streams = self._streams_of(TRAINING, number, 1)
        with streams.isolated():
            streams.start(0)
            return step()

    def agree(self, fault: str | None = None) -> None:
        """Before a batch: which cuts a gradient crosses, those above a stage that trains anything.

        Parameters may be frozen or unfrozen between any two batches, and only their owners see it.

        Args:
            fault: what is wrong with such a change.

        Raises:
            RuntimeError: a rank of the pipeline has a fault; on all of them.
        """
        seen = torch.zeros(self.num_stages + 1, dtype=torch.int32)
        for row in self.parameters:
            if row.parameter.requires_grad:
                for stage in row.stages.intersection(self.stages):
                    seen[stage] = 1
        seen[-1] = fault is not None
        *trains, is_faulty = all_reduce_(seen, self.groups.pipeline, MAX).tolist()
        if is_faulty:
            raise RuntimeError(next(text for text in gather_objects(fault, self.groups.pipeline) if text is not None))
        self._carries = tuple(any(trains[: cut + 1]) for cut in range(self.num_stages - 1))

    def follow_first_replica(self) -> None:
        """After a batch: take over the buffers of replica 0 that the step has changed."""
        assert self._moving is not None, "join_statistics comes before the first batch"
        self._moving.follow()

    def _follow(self, run: BatchRun, schedule: str, *, trains: bool) -> None:
        worker = StageWorker(self._skeleton, run, trains=trains, carries=self._carries)
        actions = self._actions(schedule, len(run.sizes))
        with run.streams.isolated(), _one_autocast_copy(self.device), self._blame(run):
            self._runtime.run(actions, worker, run.key, run.at)
        if self._scatter_gather is not None:
            self._scatter_gather.check()

    def _actions(self, schedule: str, num_microbatches: int) -> Sequence[Action]:
        if num_microbatches == 0:
            return ()
        v = self.config.virtual_pipeline_size
        return _program(schedule, self._p, num_microbatches, v)[self.groups.at.pipeline]

    def _schedule_of_training(self) -> str:
        v = self.config.virtual_pipeline_size
        return choose(self.config.schedule, pipeline_parallel_size=self._p, virtual_pipeline_size=v)

    def _streams_of(self, phase: int, number: int, num_microbatches: int) -> BatchStreams:
        """A batch's random streams; a lone process with one microbatch keeps its generators, as they are."""
        are_named = self.groups.topology.world_size > 1 or num_microbatches > 1
        return BatchStreams(self.streams if are_named else None, phase, number, self.groups.at.data)

    # -- what is going on --------------------------------------------------------------------------------------------

    def record(self, spans: list[Span] | None) -> None:
        """Have the runtime append what it does to `spans`; None to stop."""
        self._runtime.spans = spans

    def where(self) -> str | None:
        """Where the rank stands, and which stage and microbatch it runs; None where it runs none."""
        action = None if self._run is None else self._run.action
        if action is None:
            return None
        rank = self.groups.topology.describe(self.groups.rank)
        return f"{rank}, stage {action.stage}, microbatch {action.microbatch}"

    @contextmanager
    def _blame(self, run: BatchRun) -> Iterator[None]:
        """Say in an error where it happened."""
        self._run = run
        try:
            yield
        except Exception as error:
            where = self.where()
            of_all = "" if where is None else f" of {len(run.sizes)}"
            error.add_note(f"raised on {where or self.groups.topology.describe(self.groups.rank)}{of_all}")
            raise
        finally:
            self._run = None


@cache
def _program(name: str, p: int, m: int, v: int) -> Program:
    return lower(generate(name, pipeline_parallel_size=p, num_microbatches=m, virtual_pipeline_size=v))


def _one_autocast_copy(device: torch.device) -> AbstractContextManager[Any]:
    """Within, microbatches share the 16-bit copies that autocast makes of weights: it drops them where it is left for
    good, which without this is at the end of each forward, while graphs keep theirs."""
    return torch.autocast(device.type, enabled=torch.is_autocast_enabled(device.type))
