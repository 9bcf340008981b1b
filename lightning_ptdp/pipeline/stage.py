"""Runs forward and backward of one microbatch on one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_ptdp.pipeline.one_stage import Stages
from lightning_ptdp.pipeline.skeleton import Payload
from lightning_ptdp.pipeline.step_run import StepRun


@dataclass(slots=True)
class _Live:
    """What a microbatch leaves on a stage between its forward and its backward.

    The stage's output is not among it: backward starts from the edges behind its floating tensors, so that its memory
    is free once sent.
    """

    received: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]
    loss: Tensor | None


class StageWorker:
    """Runs the stages of one rank for one batch."""

    def __init__(self, skeleton: Stages, run: StepRun, *, trains: bool, carries: Sequence[bool] = ()) -> None:
        """Run the stages of `skeleton` for the microbatches of `run`.

        Args:
            trains: whether graphs are kept for backward.
            carries: [p * v - 1], for the cut above each stage but the last, whether a gradient comes down through it.
                None does where no stage below the cut has a parameter that trains.
        """
        self._skeleton, self._run, self._trains = skeleton, run, trains
        self._num_stages, self._carries = skeleton.partition.num_stages, tuple(carries)
        self._live: dict[tuple[int, int], _Live] = {}

    @property
    def num_live(self) -> int:
        """Number of microbatches between forward and backward, over all stages of the rank."""
        return len(self._live)

    def sends_gradient(self, stage: int) -> bool:
        """Whether the stage's backward gives the stage below a gradient."""
        return self._trains and stage > 0 and self._carries[stage - 1]

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        """Run a stage; returns what it sends on, None from the last one."""
        inputs = () if received is None else received.tensors
        if self.sends_gradient(stage):
            for tensor in inputs:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        output, result = self._skeleton.forward(stage, microbatch, received, self._run)
        if stage < self._num_stages - 1:
            assert output is not None, "a stage below the last leaves the step with a payload"
            if self._trains:
                edges = tuple(_edge(tensor) for tensor in output.tensors if tensor.is_floating_point())
                self._live[stage, microbatch] = _Live(inputs, edges, None)
            return Payload(tuple(t.detach() for t in output.tensors), output.structure, output.others)
        loss = self._run.take(microbatch, result)
        if self._trains:
            self._live[stage, microbatch] = _Live(inputs, (), loss)
        return None

    def backward(self, stage: int, microbatch: int, gradients: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Run a stage's backward; returns the gradients of what the stage had received, for the stage below.

        Args:
            stage: its number.
            microbatch: its number.
            gradients: of the floating tensors that the stage sent; None on the last stage, and if none comes back.

        Raises:
            RuntimeError: no gradient reached what was received.
        """
        live = self._live.pop((stage, microbatch))
        if gradients is not None:
            pairs = [(edge, g) for edge, g in zip(live.edges, gradients, strict=True) if edge is not None]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
        elif live.loss is not None:
            if self.sends_gradient(stage) and not live.loss.requires_grad:
                raise _no_gradient(stage)
            self._run.backward(live.loss)
        started = gradients is not None or live.loss is not None
        return self._input_gradients(stage, live, started=started)

    def _input_gradients(self, stage: int, live: _Live, *, started: bool) -> tuple[Tensor, ...]:
        if not self.sends_gradient(stage):
            return ()
        floating = [tensor for tensor in live.received if tensor.is_floating_point()]
        if floating and started and all(tensor.grad is None for tensor in floating):
            raise _no_gradient(stage)
        return tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in floating)


def _no_gradient(stage: int) -> RuntimeError:
    return RuntimeError(
        f"no gradient reached the activation that stage {stage} received: what follows does not depend on it, or "
        "detaches it (detach(), torch.no_grad()); let the loss follow from every block, or use pipeline_parallel_size=1"
    )


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Find where backward enters for an output; None if it needs no gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
