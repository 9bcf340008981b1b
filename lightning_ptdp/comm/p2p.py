"""Tensors from stage to stage, in the order of the program.

The wire has no tags that every backend honours, so both ranks of a pair issue their messages in the same order: the
lowered program's. A receive is posted where the sender sends and waited for by its consumer.

What arrives is known beforehand: all stages see the same microbatch, and its shapes fix the shapes that cross a cut.
The first time that a stage meets an input of new shapes it sends an `Envelope` ahead; later ones go without. It also
says which tensors come in parts, one from each tensor peer (`ScatterGather`).
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.in_process import rank_in
from lightning_ptdp.comm.scatter_gather import ScatterGather

MessageKey = tuple[str, Hashable]
"""What a message is: words that name its cut and direction, and what stands for the shapes of the microbatch."""

# Messages that a rank keeps because they may not have left. Gloo knows that of a send only once it has been waited for;
# waiting cannot deadlock, since a lowered program runs even if every send blocks until its receive is posted.
_MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class Envelope:
    """What a message holds: shape and dtype of each tensor, and anything else that the receiver needs to know.

    in_parts: for each tensor, whether each tensor peer sends a part of it.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    extra: Any
    in_parts: tuple[bool, ...]


@dataclass
class Arriving:
    """Tensors on their way, and the works to wait for.

    tensors: as they come, whole or a part. scatter_gather: joins parts; None where there are none.
    """

    envelope: Envelope
    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]
    scatter_gather: ScatterGather | None

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, complete. Tensor peers call it in the same order."""
        for work in self.works:
            work.wait()
        return tuple(
            self.scatter_gather.join(tensor, shape) if is_part and self.scatter_gather is not None else tensor
            for tensor, (shape, _), is_part in zip(
                self.tensors, self.envelope.tensors, self.envelope.in_parts, strict=True
            )
        )


class Messenger:
    """Sends and receives tensors between the ranks of one pipeline."""

    def __init__(self, group: ProcessGroup, device: torch.device, scatter_gather: ScatterGather | None = None) -> None:
        """
        Args:
            group: the ranks of the pipeline.
            device: where received tensors are put.
            scatter_gather: lets tensor peers send what they hold alike in parts, one each; None sends everything whole.
        """
        self._group, self._device, self._scatter_gather = group, device, scatter_gather
        self._sent: dict[MessageKey, Envelope] = {}
        self._received: dict[MessageKey, Envelope] = {}
        self._in_flight: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def send(self, tensors: tuple[Tensor, ...], destination: int, key: MessageKey, extra: Any = None) -> None:
        """Start to send; the tensors are kept until they are gone, those of a few messages at most.

        Args:
            tensors: of any shapes, which are the same whenever the key is.
            destination: global rank.
            key: an envelope goes ahead the first time that this rank uses it.
            extra: a picklable object for the envelope.

        Raises:
            RuntimeError: tensors of other shapes were sent under this key before.
        """
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        envelope = self._sent.get(key)
        if envelope is None:
            in_parts = (False,) * len(tensors) if self._scatter_gather is None else self._scatter_gather.alike(tensors)
            envelope = self._sent[key] = Envelope(shapes, extra, in_parts)
            self._send_object(envelope, destination)
        elif envelope.tensors != shapes:
            raise RuntimeError(
                f"activations of shapes {shapes} leave this stage where inputs of the same shapes gave "
                f"{envelope.tensors}; a pipeline needs activations whose shapes follow from the input's: pad them"
            )
        self._settle(_MAX_IN_FLIGHT - 1)
        peer, works, leaving = rank_in(self._group, destination), [], []
        for tensor, is_part in zip(tensors, envelope.in_parts, strict=True):
            content = tensor.contiguous()
            if is_part and self._scatter_gather is not None:
                content = self._scatter_gather.part(content, key[0])
            work = dist.isend(content, group_dst=peer, group=self._group)
            assert work is not None, "this rank is in the pipeline's group"
            works.append(work)
            leaving.append(content)
        self._in_flight.append((works, leaving))

    def receive(self, source: int, key: MessageKey) -> Arriving:
        """Post the receive that meets the `send` under the same key."""
        envelope = self._received.get(key)
        if envelope is None:
            envelope = self._receive_object(source)
            assert isinstance(envelope, Envelope), "both ranks of a pair issue their messages in the same order"
            self._received[key] = envelope
        tensors, works, peer = [], [], rank_in(self._group, source)
        for (shape, dtype), is_part in zip(envelope.tensors, envelope.in_parts, strict=True):
            if is_part and self._scatter_gather is not None:
                tensor = self._scatter_gather.like_part(shape, dtype, self._device)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(tensor, group_src=peer, group=self._group)
            assert work is not None, "this rank is in the pipeline's group"
            tensors.append(tensor)
            works.append(work)
        return Arriving(envelope, tuple(tensors), tuple(works), self._scatter_gather)

    def _settle(self, remaining: int) -> None:
        """Let go of messages that have left, and wait for the oldest until no more than `remaining` are under way."""
        while self._in_flight and all(work.is_completed() for work in self._in_flight[0][0]):
            self._in_flight.popleft()
        while len(self._in_flight) > remaining:
            works, _ = self._in_flight.popleft()
            for work in works:
                work.wait()

    def _send_object(self, value: Any, destination: int) -> None:
        """Send a picklable object from the host: its length ahead, then its bytes."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(content)]), content):
            dist.send(tensor, group_dst=rank_in(self._group, destination), group=self._group)

    def _receive_object(self, source: int) -> Any:
        (length,) = self._receive_on_host(torch.empty(1, dtype=torch.int64), source).tolist()
        content = self._receive_on_host(torch.empty(length, dtype=torch.uint8), source).numpy().tobytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, at unpickling its own LeafSpec
            return pickle.loads(content)

    def _receive_on_host(self, tensor: Tensor, source: int) -> Tensor:
        work = dist.irecv(tensor, group_src=rank_in(self._group, source), group=self._group)
        assert work is not None, "this rank is in the pipeline's group"
        work.wait()
        return tensor

    def flush(self) -> None:
        """Wait until everything sent is gone."""
        self._settle(0)
