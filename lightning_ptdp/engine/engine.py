"""One batch on one rank: cut it, run the schedule, collect the gradients, reduce them.

Set-up, in this order (the reverse fails: a twin would run parallel modules):

    find the blocks -> twins of the plain module -> own and hollow -> tensor-parallel plan on what is owned
    -> values of what is owned, if they were put off -> recomputation -> move to the device -> optimizers on the whole
    tree -> gradient buffers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.comm.collectives import MAX, MIN, all_reduce_, gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.comm.p2p import Messenger
from lightning_ptdp.comm.shares import Shares
from lightning_ptdp.config import ParallelConfig, micro_batch_size
from lightning_ptdp.data_parallel import batch_norm
from lightning_ptdp.data_parallel.buckets import GradientBuffers
from lightning_ptdp.data_parallel.clip import total_norm
from lightning_ptdp.data_parallel.main_weights import MainWeights, Run
from lightning_ptdp.data_parallel.manual import ManualGradients
from lightning_ptdp.data_parallel.moving_buffers import MovingBuffers
from lightning_ptdp.data_parallel.tied import SharedGradients, SharedParameter
from lightning_ptdp.deferred_init import DeferredInit
from lightning_ptdp.engine.loss_weight import TargetCounter, Weight, weigh
from lightning_ptdp.engine.microbatches import Microbatch, num_samples, split
from lightning_ptdp.engine.outputs import detached
from lightning_ptdp.pipeline.partition import Partition
from lightning_ptdp.pipeline.runtime import Runtime
from lightning_ptdp.pipeline.skeleton import Skeleton, aliases_of, nothing
from lightning_ptdp.pipeline.stage import StageWorker
from lightning_ptdp.random_streams import RandomStreams
from lightning_ptdp.recompute import Beginning, Plan, Recomputation, install
from lightning_ptdp.schedule import Action, Program, Span, choose, generate, lower
from lightning_ptdp.tensor_parallel.agreement import disagreements
from lightning_ptdp.tensor_parallel.convert import convert
from lightning_ptdp.tensor_parallel.logits import join_all
from lightning_ptdp.tensor_parallel.placement import Placement

UserStep = Callable[[Microbatch, bool], Any]
"""Runs the user's step on a microbatch; the flag says whether this is the run that ends in a loss."""

TRAINING, EVALUATION = 0, 1


@dataclass
class BatchRun:
    """What one batch left on a rank.

    sizes: rows of each microbatch.
    outputs: of the user's step, a microbatch each; empty below the last stage, as are weights and losses. None where
        the step left a microbatch out.
    weights: of the microbatches; a weight of 0 means that the microbatch does not count.
    losses: unweighted, detached.
    scale: what the backward of the batch was divided by: gradients are those of sum(weight * loss) / scale.
    """

    sizes: list[int]
    outputs: list[Any] = field(default_factory=list)
    weights: list[float | Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    scale: float = 1.0

    @property
    def num_samples(self) -> int:
        """Rows of the batch."""
        return sum(self.sizes)

    @property
    def is_skipped(self) -> bool:
        """Whether the step left every microbatch out."""
        return bool(self.outputs) and all(output is None for output in self.outputs)

    @cached_property
    def weight_numbers(self) -> list[float]:
        """The weights, on the host."""
        return numbers(self.weights)

    @cached_property
    def loss_numbers(self) -> list[float]:
        """The losses, on the host."""
        return numbers(self.losses)


@dataclass(frozen=True)
class Stepped:
    """A parameter of the module under one of its names, and what an optimizer steps for it.

    run: of the flattened parameter; None for all of it.
    """

    name: str
    parameter: nn.Parameter
    weight: nn.Parameter
    run: Run | None


class Engine:
    """Runs batches on a module that `set_up` split, or that is whole on this rank."""

    def __init__(
        self,
        config: ParallelConfig,
        groups: Groups,
        device: torch.device,
        seed: int,
        *,
        checks_agreement: bool = True,
    ) -> None:
        """seed: of the run's random streams, the same on every rank. checks_agreement: of tensor peers on the first
        gradients."""
        self.config, self.groups, self.device = config, groups, device
        topology = groups.topology
        self._p, self._d = topology.pipeline_parallel_size, topology.data_parallel_size
        self.num_stages = self._p * config.virtual_pipeline_size
        self.stages = tuple(range(groups.at.pipeline, self.num_stages, self._p))
        self.skeleton: Skeleton | None = None
        self.placement = Placement()
        self.buffers: GradientBuffers | None = None
        self.mains: MainWeights | None = None
        self._shards = False
        self._first_nonfinite = ""
        self.manual: ManualGradients | None = None
        self._moving: MovingBuffers | None = None
        self._restore_batch_norms: Callable[[], None] | None = None
        self._shared: SharedGradients | None = None
        self._beginnings: tuple[Beginning, ...] = ()
        self._recomputation: Recomputation | None = None
        self.streams = RandomStreams(seed, device)
        shares_out = config.scatter_gather and not config.sequence_parallel
        has_both = min(topology.tensor_parallel_size, self._p) > 1
        self._shares = Shares(groups.tensor, groups.replica) if shares_out and has_both else None
        self._runtime = Runtime(
            Messenger(groups.pipeline, device, self._shares), groups.pipeline_ranks, groups.at.pipeline
        )
        self._current: Action | None = None
        self._summed: list[nn.Parameter] = []
        self._replicated: dict[str, nn.Parameter] = {}
        self._checks_agreement = checks_agreement
        self._has_agreed = False
        self._is_reduced = True  # whether the last accumulation window is complete
        self._members: dict[int, list[nn.Parameter]] = {stage: [] for stage in self.stages}
        self._carries: tuple[bool, ...] = ()

    # -- set-up ----------------------------------------------------------------------------------------------------

    def set_up(
        self,
        module: nn.Module,
        partition: Partition | None,
        placement: Placement,
        deferred: DeferredInit | None = None,
    ) -> None:
        """Own this rank's part of `module`; one that an earlier run of the same layout set up is taken over.

        partition: None where one stage is the whole module. deferred: what knows the values of a module without any.
        """
        if deferred is not None:
            deferred.make_hollow(module)
        self.skeleton = Skeleton.of(module)
        if self.skeleton is None and partition is not None:
            self.skeleton = Skeleton(module, partition, self.stages, self.device)
        if self.groups.topology.tensor_parallel_size > 1:
            value_of = attrgetter("data") if deferred is None else deferred.take
            blocks = placement.sequence_blocks
            peers = convert(module, placement, self.groups.tensor, self.device, blocks, value_of)
            self._beginnings = (peers.moment,)
        if deferred is not None:
            deferred.fill(module, self._owns)
        self.placement = placement

    def _owns(self, name: str) -> bool:
        return self.skeleton is None or self.skeleton.owns(name)

    def recompute(self, module: nn.Module, plan: Plan | None) -> None:
        """Let the planned parts of what this rank owns recompute until `close`; after `set_up`. None: nothing does."""
        if plan is not None:
            self._recomputation = install(module, plan, self.stages, self.device, self._beginnings)

    def remark_on_recomputation(self) -> str | None:
        """What the first batch showed of it that a user should know, once."""
        return None if self._recomputation is None else self._recomputation.remark()

    def whole(self) -> AbstractContextManager[None]:
        """Within, the module's parameters are those of the whole model, hollow ones included."""
        return nullcontext() if self.skeleton is None else self.skeleton.whole()

    def join_statistics(self, module: nn.Module, *, all_batch_norms: bool) -> None:
        """Let batch norms train on the samples of all replicas (all, or torch's `SyncBatchNorm`), and replicas follow
        the first in buffers that training moves; the module is on its device."""
        group, first = self.groups.data, self.groups.topology.data_ranks(self.groups.at)[0]
        self._restore_batch_norms = batch_norm.synchronize(module, group, all_of_them=all_batch_norms)
        self._moving = MovingBuffers(module, group, first)

    def state_names(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the plain module's state, in order."""
        return tuple(module.state_dict()) if self.skeleton is None else self.skeleton.state_names

    def aliases(self, module: nn.Module) -> Mapping[str, Sequence[str]]:
        """All names of the plain module's parameter, by each of them."""
        return aliases_of(module) if self.skeleton is None else self.skeleton.aliases

    def plain_names(self, module: nn.Module) -> dict[nn.Parameter, str]:
        """The plain module's name of each parameter that this rank owns: the first, where several are tied."""
        names: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = name if self.skeleton is None else self.skeleton.aliases[name][0]
            names.setdefault(parameter, first)
        return names

    def held_names(self, module: nn.Module) -> dict[nn.Parameter, str]:
        """The plain module's name of each parameter that optimizers step here, or would step."""
        names = self.plain_names(module)
        return names if self.mains is None else {self.mains.weight_of(p): name for p, name in names.items()}

    def bind_manual(self, module: nn.Module) -> None:
        """Follow the backwards of manual optimization."""
        self.release()
        names, groups = self.plain_names(module), self.groups
        self.manual = ManualGradients(names, self.placement.summed, tensor=groups.tensor, data=groups.data)

    def bind(self, module: nn.Module, trained: Sequence[nn.Parameter], *, shards: bool = False) -> None:
        """Make gradient buffers and main weights for what optimizers train and this rank owns.

        Called again when that changes, between two accumulation windows.

        trained: parameters of the module. shards: whether replicas share the main weights out; then those that are no
        longer trained keep their place.
        """
        shared = [] if self.skeleton is None else self._shared_parameters(module, self.skeleton)
        owners = {member.parameter: member.owners for member in shared if member.parameter is not None}
        self._shards = shards
        if shards and self.buffers is not None and self.mains is not None:
            added = [p for p in trained if p not in self.buffers]
            self.buffers.extend(added, owners)
            self.mains.extend(added)
        else:
            replicas = self.groups.data if shards else None
            self.release()
            self.buffers = GradientBuffers(trained, owners, 1 if replicas is None else replicas.size())
            self.mains = MainWeights(self.buffers, replicas, None if shards else self.mains)
        names = self.plain_names(module)
        bound = self.buffers.parameters
        self._summed = [p for p in bound if names[p] in self.placement.summed]
        self._replicated = {names[p]: p for p in bound if names[p] not in self.placement.shards}
        self._has_agreed = not self._checks_agreement
        if self.skeleton is not None:
            self._shared = SharedGradients(shared, self.groups, self.device)
            stages = {p: self.skeleton.owners(name) for p, name in names.items()}
            self._members = {s: [p for p in names if s in stages[p]] for s in self.stages}

    def trains(self, trained: Sequence[nn.Parameter]) -> bool:
        """Whether the buffers are for these parameters of the module."""
        if self.buffers is None:
            return False
        bound = set(self.buffers.parameters)
        return bound.issuperset(trained) if self._shards else bound == set(trained)

    def parameter_of(self, weight: nn.Parameter) -> nn.Parameter:
        """The module's parameter behind one that an optimizer holds."""
        return weight if self.mains is None else self.mains.parameter_of(weight)

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What optimizers step for a parameter of the module."""
        return parameter if self.mains is None else self.mains.weight_of(parameter)

    def stepped(self, module: nn.Module) -> list[Stepped]:
        """What optimizers step of this rank's parameters, or would step, under every name that they have here."""
        first = self.plain_names(module)
        return [
            Stepped(
                name, parameter, self.weight_of(parameter), None if self.mains is None else self.mains.run_of(parameter)
            )
            for local, parameter in module.named_parameters(remove_duplicate=False)
            for name in dict.fromkeys((local, first[parameter]))
        ]

    def _shared_parameters(self, module: nn.Module, skeleton: Skeleton) -> list[SharedParameter]:
        owned = dict(module.named_parameters(remove_duplicate=False))
        found = []
        for name in skeleton.parameter_names:
            owners = frozenset(stage % self._p for stage in skeleton.owners(name))
            if len(owners) > 1:
                mine = owned.get(name)
                shape = skeleton.shapes[name] if mine is None else tuple(mine.shape)
                dtype = torch.promote_types(skeleton.dtypes[name], torch.float32)
                found.append(SharedParameter(mine, owners, shape, dtype))
        return found

    def release(self) -> None:
        """Drop the gradient buffers, or what follows the user's own backwards.

        Main weights stay, for a checkpoint after the run.
        """
        if self.buffers is not None:
            self.buffers.release()
        if self.manual is not None:
            self.manual.release()
        self.buffers, self._shared, self.manual = None, None, None

    def close(self) -> None:
        """Give the module back what was its own, but not the parts of other ranks."""
        self.release()
        if self._restore_batch_norms is not None:
            self._restore_batch_norms()
            self._restore_batch_norms = None
        if self._recomputation is not None:
            self._recomputation.undo()
            self._recomputation = None

    # -- a batch ---------------------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.stages[-1] == self.num_stages - 1

    def train_batch(
        self, batch: Any, step: UserStep, backward: Callable[[Tensor], None], *, number: int, accumulate: int
    ) -> BatchRun:
        """Run forward and backward of a replica's batch; gradients wait in the buffers for `finish_batch`.

        number: of the batch in the run, which names its random streams. accumulate: batches a window.
        """
        assert self.buffers is not None, "bind comes before the first batch"
        rows = num_samples(batch)
        size = micro_batch_size(self.config.micro_batch_size, rows, self._p) if rows else 1
        microbatches = split(batch, size)
        run = BatchRun([microbatch.num_samples for microbatch in microbatches])
        loss_of = self._loss_of(run, microbatches, accumulate)
        with self.buffers.collect():
            self._run(run, microbatches, step, loss_of, backward, phase=TRAINING, number=number)
        return run

    def agree(self, fault: str | None = None) -> None:
        """Before a batch: which cuts a gradient crosses, those above a stage that trains anything.

        Parameters may be frozen or unfrozen between any two batches, and only their owners see it.

        fault: what is wrong with such a change.

        Raises:
            RuntimeError: a rank of the pipeline has a fault; on all of them.
        """
        seen = torch.zeros(self.num_stages + 1, dtype=torch.int32)
        for stage, members in self._members.items():
            seen[stage] = any(parameter.requires_grad for parameter in members)
        seen[-1] = fault is not None
        *trains, is_faulty = all_reduce_(seen, self.groups.pipeline, MAX).tolist()
        if is_faulty:
            raise RuntimeError(next(text for text in gather_objects(fault, self.groups.pipeline) if text is not None))
        self._carries = tuple(any(trains[: cut + 1]) for cut in range(self.num_stages - 1))

    def run_manual(self, step: Callable[[], Any], *, number: int) -> Any:
        """Run a step that does its own backward, on a whole module; its random streams are named as others' are."""
        if self.groups.topology.world_size == 1:
            return step()
        with self.streams.isolated():
            self.streams.start(TRAINING, number, self.groups.at.data, 0)
            return step()

    def evaluate_batch(self, batch: Any, step: UserStep, *, number: int, size: int | None) -> BatchRun:
        """Run the forward of a batch, whole or in microbatches of `size`."""
        rows = num_samples(batch)
        microbatches = [Microbatch(0, batch, rows)] if size is None else split(batch, size)
        run = BatchRun([microbatch.num_samples for microbatch in microbatches])

        def loss_of(k: int, output: Any) -> None:
            run.outputs.append(output)
            run.weights.append(float(microbatches[k].num_samples))

        self._run(run, microbatches, step, loss_of, _no_backward, phase=EVALUATION, number=number)
        return run

    def _run(
        self,
        run: BatchRun,
        microbatches: list[Microbatch],
        step: UserStep,
        loss_of: Callable[[int, Any], Tensor | None],
        backward: Callable[[Tensor], None],
        *,
        phase: int,
        number: int,
    ) -> None:
        trains = phase == TRAINING
        last = self.num_stages - 1
        is_read_once = self.num_stages == len(microbatches) == 1  # else chunks, neighbours and `key` read it, unchanged

        def user_step(stage: int, k: int) -> Any:
            if self._names_streams(run):
                self._enter_streams(phase, number, k, stage)
            microbatch = microbatches[k] if is_read_once else microbatches[k].copy()
            if not (trains and stage == last):
                return step(microbatch, stage == last)
            counter = TargetCounter()
            if self.skeleton is None:
                counter.start()
            else:
                self.skeleton.on_after_blocks = counter.start
            try:
                return step(microbatch, True), counter
            finally:
                counter.stop()
                if self.skeleton is not None:
                    self.skeleton.on_after_blocks = nothing  # an evaluation would start the counter again

        worker = StageWorker(
            self.skeleton,
            self.num_stages,
            step=user_step,
            loss_of=loss_of,
            backward=backward,
            trains=trains,
            carries=self._carries,
        )
        signatures: dict[int, Hashable] = {}

        def key(k: int) -> Hashable:
            if k not in signatures:
                signatures[k] = (phase, microbatches[k].signature())
            return signatures[k]

        actions = self._actions(len(microbatches), trains=trains)
        streams = self.streams.isolated() if self._names_streams(run) else nullcontext()
        with streams, _one_autocast_copy(self.device), self._blame(run):
            self._runtime.run(actions, worker, key, self._at)
        if self._shares is not None:
            self._shares.check()

    def _actions(self, num_microbatches: int, *, trains: bool) -> Sequence[Action]:
        if num_microbatches == 0:
            return ()
        v = self.config.virtual_pipeline_size
        name = (
            choose(self.config.schedule, pipeline_parallel_size=self._p, virtual_pipeline_size=v)
            if trains
            else "forward_only"
        )
        return _program(name, self._p, num_microbatches, v)[self.groups.at.pipeline]

    def _names_streams(self, run: BatchRun) -> bool:
        """Whether random streams are named: a lone process with one microbatch keeps its generators, as they are."""
        return self.groups.topology.world_size > 1 or len(run.sizes) > 1

    def _enter_streams(self, phase: int, number: int, k: int, stage: int) -> None:
        self.streams.start(phase, number, self.groups.at.data, k)
        if self.skeleton is not None:
            self.skeleton.on_enter = lambda: self.streams.enter_stage(stage)

    def _loss_of(
        self, run: BatchRun, microbatches: list[Microbatch], accumulate: int
    ) -> Callable[[int, Any], Tensor | None]:
        """The scalar that a microbatch's backward starts from: weight / (unit * m * d * accumulate) * loss."""
        counts = len(microbatches) * self._d
        unit = math.nan

        def loss_of(k: int, output: tuple[Any, TargetCounter]) -> Tensor | None:
            nonlocal unit
            result, counter = output
            if result is None:  # left out by the step
                run.outputs.append(None)
                run.weights.append(0.0)
                run.losses.append(torch.zeros((), device=self.device))
                return None
            loss = loss_in(result)
            rows = microbatches[k].num_samples
            weight = weigh(result, counter.calls, rows) if counts > 1 else Weight(1.0, 1.0)
            if math.isnan(unit):
                unit = 1.0 if self._restore_batch_norms is not None else weight.unit  # one that replicas share
                run.scale = unit * counts
            run.outputs.append(detached(join_all(result)))  # a graph would keep the input of its microbatch alive
            run.weights.append(weight.value)
            run.losses.append(loss.detach())
            return _scaled(loss, weight.value, run.scale * accumulate)

        return loss_of

    def finish_batch(self, factor: float, *, is_skipped: bool, is_first: bool, is_last: bool) -> None:
        """Settle the batch's gradients with what its scale left to do.

        factor: multiplies them. is_skipped: there are none. is_first, is_last: of the accumulation window.

        Raises:
            RuntimeError: the window was complete already, and its gradients reduced.
        """
        assert self.buffers is not None, "a batch was run"
        if self._is_reduced and not is_first:
            raise RuntimeError(
                "a batch ran after its accumulation window was complete: optimizer_step called its closure again, and "
                "what is reduced already would be reduced again; call the closure once, or use "
                "accumulate_grad_batches=1"
            )
        self._is_reduced = False
        if is_skipped:
            self.buffers.forget_batch()
        self.buffers.finish_batch(factor, is_first=is_first, is_only=is_first and is_last)

    def follow_first_replica(self) -> None:
        """After a batch: take over the buffers of replica 0 that the step has changed."""
        assert self._moving is not None, "join_statistics comes before the first batch"
        self._moving.follow()

    def reduce_gradients(self) -> None:
        """Sum the window's gradients over tensor peers where a weight is used on each one's own heads, over the stages
        that share a parameter, and over replicas; then publish them.

        Copies of a tied weight get the same bits: they lie in buffers of the same layout, and are summed before the
        replicas are, which may keep only a slice.
        """
        assert self.buffers is not None, "a batch was run"
        assert self.mains is not None, "made with the buffers"
        self._is_reduced = True
        self.buffers.sum_over(self._summed, self.groups.tensor)
        self._check_agreement(self.buffers)
        if self._shared is not None:
            self._shared.reduce(self.buffers)
        if self._shards:
            self.buffers.reduce_to_slices(self.groups.data)
        else:
            self.buffers.reduce(self.groups.data)
        self.mains.publish()

    def are_gradients_finite(self) -> bool:
        """Whether all reduced gradients of all ranks are."""
        assert self.buffers is not None, "a batch was run"
        return bool(all_reduce_(torch.tensor(int(self.buffers.is_finite())), self.groups.world, MIN))

    def watch_gradients(self, module: nn.Module) -> None:
        """Look at each gradient of the next batch as it comes, until `refuse_nonfinite`."""
        assert self.buffers is not None, "bind comes before the first batch"
        self._first_nonfinite = ""
        names = self.plain_names(module)

        def note(parameter: nn.Parameter) -> None:
            action = self._current
            if not self._first_nonfinite and action is not None:
                where = self.groups.topology.describe(self.groups.rank)
                self._first_nonfinite = (
                    f"{names[parameter]!r} on {where}, stage {action.stage}, microbatch {action.microbatch}"
                )

        self.buffers.on_nonfinite = note

    def refuse_nonfinite(self, scale: float | None) -> None:
        """Raise on every rank if any saw a gradient that is not finite in the batch that was watched.

        scale: of the loss; None where it has none.

        Raises:
            FloatingPointError: with the first parameter, stage and microbatch of each such rank.
        """
        assert self.buffers is not None, "a batch was run"
        self.buffers.on_nonfinite = None
        seen = [text for text in gather_objects(self._first_nonfinite, self.groups.world) if text]
        if seen:
            scaled = "" if scale is None else f" at loss scale {scale:g}, the lowest"
            raise FloatingPointError(
                f"gradients are not finite{scaled}: first that of {'; '.join(seen)}; look at the loss and the data of "
                "that batch, lower the learning rate, clip gradients, or train in bfloat16"
            )

    def refresh_weights(self) -> None:
        """After the optimizers stepped: bring the module's parameters up to date."""
        if self.mains is not None:
            self.mains.refresh()

    def take_edits(self) -> None:
        """Before optimizers step, or states are read: let main weights follow what was done to the module's own."""
        if self.mains is not None:
            self.mains.take_edits()

    def _check_agreement(self, buffers: GradientBuffers) -> None:
        """After the first batch: tensor peers must have the same gradient for what each holds whole.

        Raises:
            ValueError: they do not.
        """
        if self._has_agreed:
            return
        self._has_agreed = True
        found = {name: buffers.gradient(p) for name, p in self._replicated.items()}
        off = disagreements({name: g for name, g in found.items() if g is not None}, self.groups.tensor)
        if off:
            raise ValueError(
                f"tensor-parallel peers disagree on the gradients of {off}, which each holds whole: they are used on a "
                "peer's own heads or part of the sequence, or a random draw between split layers differs; give them "
                'the style "replicated_with_grad_allreduce" in tensor_parallel_plan'
            )

    def gradient_norm(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The norm of the published gradients over the whole model, each element counted by one of its owners.

        parameters: that optimizers hold.
        """
        names = self.plain_names(module)
        mine = [p.grad for p in parameters if p.grad is not None and self._counts(names[self.parameter_of(p)])]
        return total_norm(mine, self.groups.world if self._shards else self.groups.replica, self.device)

    def _counts(self, name: str) -> bool:
        """Whether this rank is the one to count a parameter: on the first stage that owns it, and of tensor peers the
        first unless each has a shard."""
        at = self.groups.at
        owner = 0 if self.skeleton is None else min(self.skeleton.owners(name)) % self._p
        return at.pipeline == owner and (at.tensor == 0 or name in self.placement.shards)

    # -- what is going on ------------------------------------------------------------------------------------------

    def record(self, spans: list[Span] | None) -> None:
        """Have the runtime append what it does to `spans`; None to stop."""
        self._runtime.spans = spans

    def _at(self, action: Action) -> None:
        self._current = action

    @contextmanager
    def _blame(self, run: BatchRun) -> Iterator[None]:
        """Say in an error where it happened."""
        self._current = None
        try:
            yield
        except Exception as error:
            action, where = self._current, self.groups.topology.describe(self.groups.rank)
            at = f", stage {action.stage}, microbatch {action.microbatch} of {len(run.sizes)}" if action else ""
            error.add_note(f"raised on {where}{at}")
            raise


@cache
def _program(name: str, p: int, m: int, v: int) -> Program:
    return lower(generate(name, pipeline_parallel_size=p, num_microbatches=m, virtual_pipeline_size=v))


def _one_autocast_copy(device: torch.device) -> AbstractContextManager[Any]:
    """Within, microbatches share the 16-bit copies that autocast makes of weights: it drops them where it is left for
    good, which without this is at the end of each forward, while graphs keep theirs."""
    return torch.autocast(device.type, enabled=torch.is_autocast_enabled(device.type))


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Scalars as floats on the host; tensors cross together, in float64."""
    tensors = [value.double() for value in values if isinstance(value, Tensor)]
    crossed = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(crossed) if isinstance(value, Tensor) else float(value) for value in values]


def loss_in(result: Any) -> Tensor:
    """The loss among what a training step returned, without dims.

    Raises:
        ValueError: there is no loss of one number.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            'training_step must return a loss of one number, or a dict that holds it as "loss", '
            f"or None to leave a microbatch out; got {found}"
        )
    return loss.reshape(())


def _scaled(loss: Tensor, weight: float | Tensor, scale: float) -> Tensor | None:
    """loss * weight / scale; None where the weight is known to be 0, so that a mean of nothing (NaN) is not spread."""
    if isinstance(weight, Tensor) and weight.device.type == "cpu":
        weight = float(weight)
    if isinstance(weight, Tensor):
        counted = torch.where(weight > 0, loss, torch.zeros_like(loss))
        return counted * (weight / scale)
    return loss * (weight / scale) if weight > 0 else None


def _no_backward(_: Tensor) -> None:
    raise AssertionError("evaluation has no backward")
