"""Runs one rank's part of a program."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from lightning_ptdp.comm.p2p import Arriving, Messenger
from lightning_ptdp.pipeline.skeleton import Payload
from lightning_ptdp.pipeline.stage import StageWorker
from lightning_ptdp.schedule import Action, Op, Span


class Runtime:
    """Takes actions one by one to a stage worker and the wire.

    What arrives waits in `_arriving` for the compute that consumes it, and what a compute gives in `_leaving` for its
    send.
    """

    def __init__(self, messenger: Messenger, pipeline_ranks: Sequence[int], rank: int) -> None:
        """
        Args:
            messenger: the wire.
            pipeline_ranks: global ranks, from the first stage to the last.
            rank: the number of this rank among them.
        """
        self._messenger, self._ranks, self._rank = messenger, pipeline_ranks, rank
        self._arriving: dict[tuple[Op, int, int], Arriving] = {}
        self._leaving: dict[tuple[Op, int, int], Payload | tuple[Tensor, ...]] = {}
        self.spans: list[Span] | None = None

    def run(
        self,
        actions: Sequence[Action],
        worker: StageWorker,
        key: Callable[[int], Hashable],
        at: Callable[[Action], None] = lambda _: None,
    ) -> None:
        """Run the actions in order.

        Args:
            actions: this rank's part of a lowered program.
            worker: runs forwards and backwards.
            key: gives for a microbatch what stands for its shapes, the same on all stages.
            at: is told each action before it runs.
        """
        table = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECV_ACTIVATION: self._receive_activation,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.RECV_GRADIENT: self._receive_gradient,
        }
        self._arriving, self._leaving = {}, {}
        for action in actions:
            at(action)
            start = time.perf_counter()
            table[action.op](action, worker, key)
            if self.spans is not None:
                self.spans.append(Span(self._rank, start, time.perf_counter() - start, action))
        self._messenger.flush()

    def _forward(self, action: Action, worker: StageWorker, _: Callable[[int], Hashable]) -> None:
        arriving = self._arriving.pop((Op.RECV_ACTIVATION, action.stage, action.microbatch), None)
        received = None
        if arriving is not None:
            structure, others = arriving.envelope.extra
            received = Payload(arriving.wait(), structure, others)
        output = worker.forward(action.stage, action.microbatch, received)
        if output is not None:
            self._leaving[Op.SEND_ACTIVATION, action.stage, action.microbatch] = output

    def _backward(self, action: Action, worker: StageWorker, _: Callable[[int], Hashable]) -> None:
        arriving = self._arriving.pop((Op.RECV_GRADIENT, action.stage, action.microbatch), None)
        gradients = None if arriving is None else arriving.wait()
        leaving = worker.backward(action.stage, action.microbatch, gradients)
        if worker.sends_gradient(action.stage):
            self._leaving[Op.SEND_GRADIENT, action.stage, action.microbatch] = leaving

    def _send_activation(self, action: Action, _: StageWorker, key: Callable[[int], Hashable]) -> None:
        payload = self._leaving.pop((Op.SEND_ACTIVATION, action.stage, action.microbatch))
        assert isinstance(payload, Payload), "a forward leaves a payload"
        self._messenger.send(
            payload.tensors,
            self._peer(action.stage + 1),
            (_activations_of(action.stage), key(action.microbatch)),
            extra=(payload.structure, payload.others),
        )

    def _receive_activation(self, action: Action, _: StageWorker, key: Callable[[int], Hashable]) -> None:
        self._arriving[action.op, action.stage, action.microbatch] = self._messenger.receive(
            self._peer(action.stage - 1), (_activations_of(action.stage - 1), key(action.microbatch))
        )

    def _send_gradient(self, action: Action, worker: StageWorker, key: Callable[[int], Hashable]) -> None:
        if not worker.sends_gradient(action.stage):
            return
        gradients = self._leaving.pop((Op.SEND_GRADIENT, action.stage, action.microbatch))
        assert isinstance(gradients, tuple), "a backward leaves gradients"
        self._messenger.send(
            gradients, self._peer(action.stage - 1), (_gradients_of(action.stage), key(action.microbatch))
        )

    def _receive_gradient(self, action: Action, worker: StageWorker, key: Callable[[int], Hashable]) -> None:
        if not worker.sends_gradient(action.stage + 1):
            return
        self._arriving[action.op, action.stage, action.microbatch] = self._messenger.receive(
            self._peer(action.stage + 1), (_gradients_of(action.stage + 1), key(action.microbatch))
        )

    def _peer(self, stage: int) -> int:
        return self._ranks[stage % len(self._ranks)]


def _activations_of(stage: int) -> str:
    return f"the activations that stage {stage} sends"


def _gradients_of(stage: int) -> str:
    return f"the gradients that stage {stage} sends"
