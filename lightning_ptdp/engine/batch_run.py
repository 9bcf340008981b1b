"""One batch on one rank: the user's step on each of its microbatches, and what that leaves.

    call(stage, k)      start the microbatch's random streams, run the user's step on it
    take(k, result)     keep what the last stage returned; in training, make its loss the scalar of a backward
    backward(scalar)    start the backward

**The loss is divided here.** A microbatch's backward starts from

    loss * weight / (unit * m * d * accumulate)

weight: terms that the loss is a mean of. unit: the usual size of a weight, so that numbers stay near 1 in 16 bits.
m: microbatches of the batch. d: replicas. When all weights are known, `Gradients.settle` multiplies once by
unit * m * d / (sum of weights over the batch), which `steps.exchange` works out, and by what a loss scale multiplied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.engine.loss_weight import TargetCounter, Weight, weigh
from lightning_ptdp.engine.microbatches import Microbatch
from lightning_ptdp.engine.outputs import detached, numbers
from lightning_ptdp.random_streams import RandomStreams
from lightning_ptdp.schedule import Action
from lightning_ptdp.tensor_parallel.logits import join_all

UserStep = Callable[[Microbatch, bool], Any]
"""Runs the user's step on a microbatch; the flag says whether this is the run that ends in a loss."""

TRAINING, EVALUATION = 0, 1  # phases, which name random streams


@dataclass(frozen=True, slots=True)
class Window:
    """A batch's place in training.

    number: of the batch in the run, which names its random streams. accumulate: batches of an accumulation window.
    is_first, is_last: of the window.
    """

    number: int
    accumulate: int = 1
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class BatchStreams:
    """The random streams of one batch on one replica. streams: None leaves the process' generators as they are."""

    streams: RandomStreams | None
    phase: int
    number: int
    replica: int

    def isolated(self) -> AbstractContextManager[None]:
        """Within, the batch's streams may move the generators; afterwards these stand where they stood."""
        return nullcontext() if self.streams is None else self.streams.isolated()

    def start(self, microbatch: int) -> None:
        """Go to the stream that a microbatch has before the model."""
        if self.streams is not None:
            self.streams.start(self.phase, self.number, self.replica, microbatch)

    def enter_stage(self, stage: int) -> None:
        """Go on to the stage's own stream."""
        if self.streams is not None:
            self.streams.enter_stage(stage)


class BatchRun(ABC):
    """A batch while it runs, and what it left on this rank.

    outputs: of the user's step, a microbatch each; empty below the last stage, as are weights and losses. None where
        the step left a microbatch out.
    weights: of the microbatches; a weight of 0 means that the microbatch does not count.
    losses: unweighted, detached.
    scale: what the backward of the batch was divided by: gradients are those of sum(weight * loss) / scale.
    action: of the schedule, that runs.
    """

    phase: int

    def __init__(
        self, microbatches: Sequence[Microbatch], step: UserStep, streams: BatchStreams, *, num_stages: int
    ) -> None:
        """Make ready to run; num_stages: p * v."""
        self._microbatches, self._step, self.streams, self._num_stages = microbatches, step, streams, num_stages
        self._signatures: dict[int, Hashable] = {}
        self.sizes = [microbatch.num_samples for microbatch in microbatches]
        self.outputs: list[Any] = []
        self.weights: list[float | Tensor] = []
        self.losses: list[Tensor] = []
        self.scale = 1.0
        self.action: Action | None = None

    # -- while it runs -----------------------------------------------------------------------------------------------

    def at(self, action: Action) -> None:
        """Take note of what runs next."""
        self.action = action

    def key(self, microbatch: int) -> Hashable:
        """What fixes the shapes of a microbatch's activations, the same on all stages."""
        if microbatch not in self._signatures:
            self._signatures[microbatch] = (self.phase, self._microbatches[microbatch].signature())
        return self._signatures[microbatch]

    def call(self, stage: int, microbatch: int, *, is_whole: bool) -> Any:
        """Run the user's step on a microbatch as `stage`."""
        self.streams.start(microbatch)
        return self._step(self._handed_out(microbatch), stage == self._num_stages - 1)

    def _handed_out(self, microbatch: int) -> Microbatch:
        """A microbatch for the step to keep; a copy where chunks, neighbours or `key` read it again, unchanged."""
        found = self._microbatches[microbatch]
        return found if self._num_stages == len(self._microbatches) == 1 else found.copy()

    def enter_stage(self, stage: int) -> None:
        """Go on to the random stream of the stage."""
        self.streams.enter_stage(stage)

    @abstractmethod
    def after_blocks(self) -> None:
        """Take note that the model's last block has run."""

    @abstractmethod
    def take(self, microbatch: int, result: Any) -> Tensor | None:
        """Keep what the last stage's step returned; returns the scalar that backward starts from, if any."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Start the backward of a microbatch."""

    # -- what it left ------------------------------------------------------------------------------------------------

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


class TrainingRun(BatchRun):
    """A batch that is trained on."""

    phase = TRAINING

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        step: UserStep,
        streams: BatchStreams,
        *,
        num_stages: int,
        backward: Callable[[Tensor], None],
        num_replicas: int,
        accumulate: int,
        joins_replicas: bool,
        device: torch.device,
    ) -> None:
        """Make ready to run.

        Args:
            num_stages: p * v.
            backward: runs backward from a scalar.
            num_replicas: d.
            accumulate: batches of an accumulation window.
            joins_replicas: whether a replica's outputs depend on the samples of others (synchronized batch norms): then
                gradients cross replicas inside a backward, and all must be divided by the same unit.
            device: of losses.
        """
        super().__init__(microbatches, step, streams, num_stages=num_stages)
        self._backward, self._accumulate, self._device = backward, accumulate, device
        self._counts = len(microbatches) * num_replicas
        self._unit = 1.0 if joins_replicas else math.nan  # NaN: taken from the first weight
        self._targets = TargetCounter()

    def call(self, stage: int, microbatch: int, *, is_whole: bool) -> Any:
        """Run the user's step on a microbatch as `stage`; on the last one, count the targets of its loss."""
        if stage < self._num_stages - 1:
            return super().call(stage, microbatch, is_whole=is_whole)
        self._targets = TargetCounter()
        if is_whole:
            self._targets.start()
        try:
            return super().call(stage, microbatch, is_whole=is_whole)
        finally:
            self._targets.stop()

    def after_blocks(self) -> None:
        """Begin to count targets: what follows is the head and the loss."""
        self._targets.start()

    def take(self, microbatch: int, result: Any) -> Tensor | None:
        """Keep the result; returns loss * weight / (unit * m * d * accumulate), None for a microbatch left out."""
        if result is None:
            self._keep(None, 0.0, torch.zeros((), device=self._device))
            return None
        loss, rows = loss_in(result), self.sizes[microbatch]
        weight = weigh(result, self._targets.calls, rows) if self._counts > 1 else Weight(1.0, 1.0)
        if math.isnan(self._unit):
            self._unit = weight.unit
        self.scale = self._unit * self._counts
        self._keep(detached(join_all(result)), weight.value, loss.detach())  # a graph would keep the input alive
        return _scaled(loss, weight.value, self.scale * self._accumulate)

    def _keep(self, output: Any, weight: float | Tensor, loss: Tensor) -> None:
        self.outputs.append(output)
        self.weights.append(weight)
        self.losses.append(loss)

    def backward(self, loss: Tensor) -> None:
        """Start the backward of a microbatch."""
        self._backward(loss)


class EvaluationRun(BatchRun):
    """A batch that is evaluated, or predicted."""

    phase = EVALUATION

    def after_blocks(self) -> None:
        """Nothing: no loss is weighed."""

    def take(self, microbatch: int, result: Any) -> None:
        """Keep the result, which counts as much as it has samples."""
        self.outputs.append(result)
        self.weights.append(float(self.sizes[microbatch]))

    def leave_out(self) -> None:
        """Let the batch count nothing: it only keeps a replica in step with the others."""
        self.weights = [0.0] * len(self.weights)

    def backward(self, loss: Tensor) -> None:
        """Never called: evaluation keeps no graph."""
        raise AssertionError("evaluation has no backward")


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
