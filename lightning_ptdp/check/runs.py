"""Runs one training step in plain PyTorch, and as the ranks of a layout run it: loss and gradients of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_ptdp.callbacks.loop_progress import LoopProgress
from lightning_ptdp.check.copies import CPU, Original
from lightning_ptdp.check.dropout import NoDropout
from lightning_ptdp.check.trace import CallTrace, are_same_states, generator_states
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.comm.in_process import InProcessWorld
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.engine.batch_run import Window, loss_in
from lightning_ptdp.engine.engine import assemble
from lightning_ptdp.engine.microbatches import num_samples, replica_batches
from lightning_ptdp.layout import Layout
from lightning_ptdp.steps.exchange import Exchange
from lightning_ptdp.steps.steps import Steps
from lightning_ptdp.topology import Coordinate

Gradients = Mapping[str, Tensor | None]
"""Gradients by the plain module's names; None for a parameter that got none."""


@dataclass(frozen=True)
class WholeRun:
    """A step of the whole module in plain PyTorch.

    Attributes:
        loss: of the batch.
        gradients: of all parameters that are trained.
        trace: which modules drew random numbers, and what they returned if that was asked for.
        has_drawn: whether the step drew random numbers although dropout was off.
        has_dropout: whether there was dropout to turn off.
        num_rows: rows of the batch.
    """

    loss: float
    gradients: Gradients
    trace: CallTrace
    has_drawn: bool
    has_dropout: bool
    num_rows: int


@dataclass(frozen=True)
class RankRun:
    """What one rank has after a split step.

    Attributes:
        at: where the rank stands.
        loss: of the global batch, which all ranks know.
        gradients: of its shards, and of what it holds whole.
        num_microbatches: how many its replica ran.
        trace: what its modules returned, if that was asked for.
    """

    at: Coordinate
    loss: float
    gradients: Gradients
    num_microbatches: int
    trace: CallTrace


@dataclass(frozen=True)
class SplitRun:
    """A step under a layout.

    Attributes:
        layout: how the module was split.
        parts: the runs of all ranks, in their order; none if a rank failed.
        error: what the first rank that failed raised.
        running: name of the innermost module that ran on it then, "" if none did.
        traces: by global rank, also if a rank failed.
    """

    layout: Layout
    parts: tuple[RankRun, ...] = ()
    error: Exception | None = None
    running: str = ""
    traces: Mapping[int, CallTrace] = field(default_factory=dict)


def run_whole(original: Original, *, seed: int, traces_outputs: bool = False) -> WholeRun:
    """Run the user's step on the whole batch, and its backward, in plain PyTorch without dropout.

    Args:
        original: copied for the run.
        seed: of the random numbers that the step draws.
        traces_outputs: whether to note what each module returns.
    """
    with original.as_default_dtype(), torch.random.fork_rng(devices=()), torch.enable_grad():
        module, batch = original.make_module(), original.make_batch()
        trace = CallTrace()
        trace.attach(module, draws=True, outputs=traces_outputs)
        torch.manual_seed(seed)
        before = generator_states()
        with NoDropout() as mode:
            loss = loss_in(module.training_step(*_arguments(module, batch)))
            loss.backward()
        return WholeRun(
            loss=float(loss.detach()),
            gradients={name: p.grad for name, p in module.named_parameters() if p.requires_grad},
            trace=trace,
            has_drawn=not are_same_states(before, generator_states()),
            has_dropout=mode.has_dropped,
            num_rows=num_samples(batch),
        )


def run_split(
    original: Original, config: ParallelConfig, layout: Layout, *, seed: int, traces_outputs: bool = False
) -> SplitRun:
    """Run the user's step as the ranks of a layout run it, each a thread of this process, without dropout.

    Args:
        original: copied for each rank.
        config: the strategy's arguments.
        layout: how the module is split.
        seed: of the random streams.
        traces_outputs: whether to note what each module returns on each rank.
    """
    with original.as_default_dtype():
        batches = replica_batches(original.make_batch(), layout.topology.data_parallel_size)
        traces = {rank: CallTrace() for rank in range(layout.topology.world_size)}

        def body(groups: Groups) -> RankRun:
            trace = traces[groups.rank]
            module = original.make_module()
            trace.attach(module, outputs=traces_outputs)
            return _run_rank(module, batches[groups.at.data], config, layout, groups, trace, seed)

        world = InProcessWorld(layout.topology)
        try:
            parts = world.run(body)
        except Exception as error:
            running = traces[world.failed_rank].running if world.failed_rank is not None else []
            return SplitRun(layout, error=error, running=running[-1] if running else "", traces=traces)
        return SplitRun(layout, tuple(parts), traces=traces)


def _run_rank(
    module: pl.LightningModule,
    batch: Any,
    config: ParallelConfig,
    layout: Layout,
    groups: Groups,
    trace: CallTrace,
    seed: int,
) -> RankRun:
    engine = assemble(module, layout, config, groups, CPU, seed=seed, checks_agreement=False)
    engine.join_statistics(module, all_batch_norms=False)
    engine.gradients.bind(list(dict.fromkeys(p for p in module.parameters() if p.requires_grad)))
    engine.agree()
    steps = Steps(module, engine, Exchange(groups), None, LoopProgress())
    precision = _Plain(trace)
    try:
        with NoDropout():
            result = steps.train(_arguments(module, batch), {}, Window(number=0), precision)
            engine.gradients.reduce()
        gradients = {row.name: row.parameter.grad for row in engine.parameters if row.parameter.requires_grad}
    finally:
        engine.close()
    if result is None:
        raise ValueError("training_step returned None, which skips the batch; a check needs a loss")
    return RankRun(
        at=groups.at,
        loss=float(result["loss"]),
        gradients=gradients,
        num_microbatches=precision.num_steps // len(engine.stages),
        trace=trace,
    )


class _Plain:
    """Stands for the precision plugin in a check, and changes no dtype. num_steps counts runs of the user's step."""

    loss_dtype = torch.float64
    scale = 1.0

    def __init__(self, trace: CallTrace) -> None:
        self._trace = trace
        self.num_steps = 0

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Count a run of the user's step, which happens within the context."""
        self.num_steps += 1
        self._trace.running.clear()
        yield

    def backward(self, tensor: Tensor, model: Any, optimizer: Any) -> None:
        """Run backward from the loss."""
        tensor.backward()


def _arguments(module: pl.LightningModule, batch: Any) -> tuple[Any, ...]:
    """The arguments that Lightning passes to training_step: with batch_idx, or without."""
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, 0) if takes_index else (batch,)
