"""Runs a user's step on a batch: by the engine, with its logs merged, and its result known on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_ptdp.callbacks.loop_progress import LoopProgress
from lightning_ptdp.callbacks.stage_state import state_set_aside
from lightning_ptdp.comm.collectives import broadcast_object, gather_objects
from lightning_ptdp.comm.failure import FailureBoard
from lightning_ptdp.engine import outputs
from lightning_ptdp.engine.batch_run import BatchRun, Window
from lightning_ptdp.engine.engine import Engine
from lightning_ptdp.engine.microbatches import Microbatch, digest, num_samples
from lightning_ptdp.host.lightning import callbacks_of
from lightning_ptdp.steps.exchange import Exchange, StepReport
from lightning_ptdp.steps.hook_logs import HookLogs
from lightning_ptdp.steps.log_calls import LogCalls
from lightning_ptdp.steps.log_recorder import LogRecorder
from lightning_ptdp.steps.metrics import StepMetrics, frozen_metrics, sync_over_replicas

Context = Callable[[], AbstractContextManager[None]]


class StepPrecision(Protocol):
    """The part of a precision plug-in that a training step uses."""

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss that a step returns."""

    @property
    def scale(self) -> float:
        """What `backward` multiplies the loss by."""

    def train_step_context(self) -> AbstractContextManager[None]:
        """Return the context within which the user's step runs."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any) -> None:
        """Run backward from a loss, multiplied by the scale."""


class Steps:
    """Runs the steps of one module."""

    def __init__(
        self,
        module: pl.LightningModule,
        engine: Engine,
        exchange: Exchange,
        board: FailureBoard | None,
        progress: LoopProgress,
    ) -> None:
        self._module, self._engine, self._exchange, self._board = module, engine, exchange, board
        self._calls, self._metrics = LogCalls(module), StepMetrics(module)
        groups = engine.groups
        self._hooks = HookLogs(module, self._calls, exchange, groups, engine.device, lambda: progress.num_samples)
        outside = self._hooks.log if groups.topology.world_size > 1 else None
        self._recorder = LogRecorder(module, self._calls, self._metrics, outside)
        self.is_in_step = False

    def listen(self, callbacks: Sequence[Callback]) -> None:
        """Take what steps and hooks log, the callbacks' too."""
        self._recorder.attach()
        if self._engine.groups.topology.world_size > 1:
            by_hand = () if self._module.automatic_optimization else ("training_step",)
            self._hooks.attach(callbacks, extra=by_hand)
        for callback in callbacks:
            for value in vars(callback).values():
                if isinstance(value, nn.Module) and not isinstance(value, pl.LightningModule):
                    sync_over_replicas(value, self._engine.groups)
            callback.log = self._module.log  # type: ignore[attr-defined]  # Lightning sets it, to the class's

    def close(self) -> None:
        """Give the module its own `log` and hooks back."""
        self._recorder.detach()
        self._hooks.detach()
        self._metrics.close()

    def train(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], window: Window, precision: StepPrecision
    ) -> dict[str, Any] | None:
        """Run forward and backward of a batch; its gradients join those of the accumulation window.

        Args:
            args: of the user's training_step, the batch first.
            kwargs: its keyword arguments.
            window: where the batch stands in training.
            precision: of the step, its backward and its loss.

        Returns:
            What the step would have returned for the whole batch: the loss, and what else was in its dict. Where it
            left out every microbatch of every replica that is None in one process; on several ranks, where Lightning
            refuses None, the loss is 0.
        """
        step = self._user_step(self._module.training_step, precision.train_step_context, args, kwargs)

        def backward(loss: Tensor) -> None:
            precision.backward(loss, self._module, None)

        with self._running():
            run = self._engine.train(batch_of(args, kwargs), step, backward, window)
            extra = outputs.extras(run.outputs, run.sizes, run.weight_numbers) if self._engine.is_last else {}
            report = self._step_report(run, has_output=bool(extra))
        self._engine.gradients.settle(report.factor / precision.scale, window, is_skipped=report.is_skipped)
        self._engine.follow_first_replica()
        self._calls.replay(report.logged, self._engine.device)
        if report.is_skipped and self._engine.groups.topology.world_size == 1:
            return None
        loss = torch.tensor(report.loss, dtype=precision.loss_dtype, device=self._engine.device)
        return {"loss": loss, **(self._from_last_stage(extra) if report.has_output else {})}

    def train_manually(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any], *, number: int) -> Any:
        """Run a training_step that does its own backward and optimizer steps; returns what it returned."""

        def step() -> Any:
            with context():
                return self._module.training_step(*args, **kwargs)

        with self._posting_failures():
            output = self._engine.run_manual(step, number=number)
        self._engine.follow_first_replica()
        return output

    def evaluate(
        self,
        step: Callable[..., Any],
        context: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        number: int,
        size: int | None,
        counts: bool,
        joins_replicas: bool,
    ) -> Any:
        """Run the forward of a batch; returns what the step returned for it.

        Args:
            step: the user's validation_step, test_step or predict_step.
            context: of the precision plug-in.
            args: of the step, the batch first.
            kwargs: its keyword arguments.
            number: names the random streams.
            size: samples in a microbatch; None runs the batch in one piece.
            counts: False for a batch that the replica only runs because others have one more.
            joins_replicas: whether all replicas run the same number of steps, and logs merge over them.
        """
        user_step = self._user_step(step, context, args, kwargs)
        with self._running(), nullcontext() if counts else self._uncounted():
            run = self._engine.evaluate(batch_of(args, kwargs), user_step, number=number, size=size)
            if not counts:
                run.leave_out()
            output = outputs.merge(run.outputs, run.sizes, run.weight_numbers) if self._engine.is_last else None
            report = self._step_report(run, has_output=output is not None, counts=counts, joins_replicas=joins_replicas)
        self._calls.replay(report.logged, self._engine.device)
        return self._from_last_stage(output) if report.has_output else None

    def check_same(self, batch: Any) -> None:
        """Raise on every rank of a replica unless all see the same batch."""
        groups = self._engine.groups
        if groups.replica.size() == 1:
            return
        digests = gather_objects(digest(batch), groups.replica)
        if len(set(digests)) > 1:
            ranks = groups.topology.replica_ranks(groups.at)
            seen = ", ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, digests, strict=True))
            raise ValueError(
                f"the ranks of replica {groups.at.data} see different batches ({seen}); they must see the same: call "
                "lightning.seed_everything if data is drawn at random, use Lightning's own sampler, or one that "
                "splits by trainer.distributed_sampler_kwargs, and augment in loader workers (which are seeded by "
                "replica) or by a seed of the sample"
            )

    def _user_step(
        self, step: Callable[..., Any], context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Microbatch, bool], Any]:
        """Wrap the user's step as the engine calls it, so that its log calls belong to the microbatch."""
        rows = num_samples(batch_of(args, kwargs))

        def run(microbatch: Microbatch, keep: bool) -> Any:
            with (
                self._recorder.microbatch(microbatch.index, microbatch.num_samples, keep=keep),
                self._metrics.microbatch(counts=keep and microbatch.num_samples < rows),
                context(),
            ):
                if args:
                    return step(microbatch.batch, *args[1:], **kwargs)
                return step(**{**kwargs, "batch": microbatch.batch})

        return run

    def _step_report(
        self, run: BatchRun, *, has_output: bool, counts: bool = True, joins_replicas: bool = True
    ) -> StepReport:
        """Tell every rank what the last stages know of the step.

        Args:
            run: the batch, which has run.
            has_output: whether the step returned more than a loss.
            counts: whether this replica's samples count.
            joins_replicas: whether reports merge over the replicas.
        """
        mine = None
        if self._exchange.speaks:
            weights, losses = run.weight_numbers, run.loss_numbers
            mine = StepReport(
                weight=sum(weights),
                weighted_loss=sum(w * loss for w, loss in zip(weights, losses, strict=False) if w),
                scale=run.scale,
                num_samples=float(run.num_samples),
                has_output=has_output,
                logged=self._recorder.merged(weights, counts=counts),
                is_skipped=run.is_skipped,
            )
        return self._exchange.tell_all(mine, joins_replicas=joins_replicas)

    def _from_last_stage(self, value: Any) -> Any:
        """Send a value of the last stage to all ranks of its pipeline, and return it."""
        groups = self._engine.groups
        if groups.topology.pipeline_parallel_size == 1:
            return value
        message = outputs.packed(value) if self._engine.is_last else None
        message = broadcast_object(message, groups.pipeline_ranks[-1], groups.pipeline)
        return value if self._engine.is_last else outputs.unpacked(message, self._engine.device)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Keep a step within the context from leaving a trace in the module."""
        with frozen_metrics(self._module), state_set_aside(self._module):
            yield

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Record the logs of the user's step, which runs within the context."""
        self.is_in_step = True
        self._hooks.enter_step()
        self._metrics.start()
        try:
            with self._posting_failures(), self._recorder.recording():
                yield
        finally:
            self.is_in_step = False

    @contextmanager
    def _posting_failures(self) -> Iterator[None]:
        """Post a failure within the context at once, for the other ranks to read."""
        try:
            yield
        except Exception as error:
            if self._board is not None:
                self._board.report(error)
            raise


def edits_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether there are hooks of a user's that may change gradients before the optimizer's step."""
    callbacks = callbacks_of(trainer)
    return is_overridden("configure_gradient_clipping", module, pl.LightningModule) or any(
        is_overridden(hook, instance, parent)
        for hook in ("on_after_backward", "on_before_optimizer_step")
        for instance, parent in [(module, pl.LightningModule), *((callback, Callback) for callback in callbacks)]
    )


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the batch among a step's arguments."""
    return args[0] if args else kwargs["batch"]
