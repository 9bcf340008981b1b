"""Tensors from stage to stage, in the order of the program.

The wire has no tags that every backend honours, so both ranks of a pair issue their messages in the same order: the
lowered program's. A receive is posted where the sender sends and waited for by its consumer.

What arrives is known beforehand: all stages see the same microbatch, and its shapes fix the shapes that cross a cut.
The first time that a stage meets an input of new shapes it sends an `Envelope` ahead; later ones go without.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.in_process import place_in


@dataclass(frozen=True)
class Envelope:
    """What a message holds: shape and dtype of each tensor, and anything else that the receiver needs to know."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    extra: Any

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], extra: Any = None) -> Envelope:
        """Describe tensors."""
        return cls(tuple((tuple(t.shape), t.dtype) for t in tensors), extra)


@dataclass
class Arriving:
    """Tensors on their way, and the works to wait for."""

    envelope: Envelope
    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, complete."""
        for work in self.works:
            work.wait()
        return self.tensors


class Messenger:
    """Sends and receives tensors between the ranks of one pipeline."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """group: the pipeline's. device: where received tensors are put."""
        self._group, self._device = group, device
        self._sent: dict[Hashable, Envelope] = {}
        self._received: dict[Hashable, Envelope] = {}
        self._in_flight: list[tuple[dist.Work, Tensor]] = []
        self.bytes_sent = 0

    def send(self, tensors: tuple[Tensor, ...], destination: int, key: Hashable, extra: Any = None) -> None:
        """Start to send; the tensors are kept until they are gone.

        key: fixes the envelope on both sides (the cut, and the shapes of the microbatch).

        Raises:
            RuntimeError: tensors of other shapes were sent under this key before.
        """
        envelope = Envelope.of(tensors, extra)
        known = self._sent.get(key)
        if known is None:
            self._send_object(envelope, destination)
            self._sent[key] = envelope
        elif known.tensors != envelope.tensors:
            raise RuntimeError(
                f"activations of shapes {envelope.tensors} leave this stage where inputs of the same shapes gave "
                f"{known.tensors}; a pipeline needs activations whose shapes follow from the input's: pad them"
            )
        self.send_known(tensors, destination)

    def send_known(self, tensors: tuple[Tensor, ...], destination: int) -> None:
        """Start to send tensors whose shapes the receiver knows."""
        self._in_flight = [(work, tensor) for work, tensor in self._in_flight if not work.is_completed()]
        place = place_in(self._group, destination)
        for tensor in tensors:
            whole = tensor.contiguous()
            work = dist.isend(whole, group_dst=place, group=self._group)
            assert work is not None, "this rank is in the pipeline's group"
            self._in_flight.append((work, whole))
            self.bytes_sent += whole.nbytes

    def receive(self, source: int, key: Hashable) -> Arriving:
        """Post the receive that meets the `send` under the same key."""
        envelope = self._received.get(key)
        if envelope is None:
            envelope = self._receive_object(source)
            assert isinstance(envelope, Envelope), "both ranks of a pair issue their messages in the same order"
            self._received[key] = envelope
        return self.receive_known(source, envelope)

    def receive_known(self, source: int, envelope: Envelope) -> Arriving:
        """Post the receive of tensors whose shapes are known."""
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in envelope.tensors)
        works, place = [], place_in(self._group, source)
        for tensor in tensors:
            work = dist.irecv(tensor, group_src=place, group=self._group)
            assert work is not None, "this rank is in the pipeline's group"
            works.append(work)
        return Arriving(envelope, tensors, tuple(works))

    def _send_object(self, value: Any, destination: int) -> None:
        """Send a picklable object from the host: its length ahead, then its bytes."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(content)]), content):
            dist.send(tensor, group_dst=place_in(self._group, destination), group=self._group)

    def _receive_object(self, source: int) -> Any:
        (length,) = self._receive_on_host(torch.empty(1, dtype=torch.int64), source).tolist()
        content = self._receive_on_host(torch.empty(length, dtype=torch.uint8), source).numpy().tobytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, at unpickling its own LeafSpec
            return pickle.loads(content)

    def _receive_on_host(self, tensor: Tensor, source: int) -> Tensor:
        work = dist.irecv(tensor, group_src=place_in(self._group, source), group=self._group)
        assert work is not None, "this rank is in the pipeline's group"
        work.wait()
        return tensor

    def flush(self) -> None:
        """Wait until everything sent is gone."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight = []
