"""A world whose ranks are threads of one process: what a check of a layout runs on, where a run has processes.

The ranks take turns: one runs at a time, until it waits for another or ends. So nothing depends on timing, each rank
has random generators to itself as a process has, and ranks that wait for each other are seen at once.

Everything above `comm/` sees ordinary process groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.generators import HostState, go_to, states_of
from lightning_ptdp.topology import Topology

T = TypeVar("T")


class _WorldEnded(BaseException):
    """Ends a rank because another one failed. Not an `Exception`: a user's handler must not catch it."""


class InProcessWorld:
    """Ranks that are threads of this process, and take turns."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._condition = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._done: set[int] = set()
        self._failure: BaseException | None = None
        self.failed_rank: int | None = None
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meetings] = {}

    def run(self, body: Callable[[Groups], T]) -> list[T]:
        """Run `body` on every rank; returns what each returned, in the order of ranks.

        Raises:
            Exception: what the first rank that failed raised; the others are ended.
            RuntimeError: all ranks wait for each other.
        """
        size = self.topology.world_size
        results: dict[int, T] = {}

        here = _Generators()

        def run_rank(rank: int) -> None:
            self._await_turn(rank, here)
            try:
                self._raise_if_ended()
                results[rank] = body(self._groups(rank))
            except _WorldEnded:
                pass  # another rank failed, and says why
            except BaseException as error:
                self._failure, self.failed_rank = error, rank
            finally:
                with self._condition:
                    self._done.add(rank)
                    self._pass_on(rank)

        threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._failure = self._failure or (None if len(self._done) == size else KeyboardInterrupt())
            here.restore()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(size)]

    def wait(self, rank: int, is_ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until this one can go on.

        Args:
            rank: that waits.
            is_ready: tells whether it can go on.
            what: it waits for, in words.
        """
        if is_ready():
            return
        mine = _Generators()
        with self._condition:
            self._waiting[rank] = (is_ready, what)
            self._pass_on(rank)
        self._await_turn(rank, mine)
        self._raise_if_ended()

    def meetings(self, name: str, ranks: tuple[int, ...]) -> _Meetings:
        """Look up where the ranks of a group meet for collectives and messages."""
        return self._meetings.setdefault((name, ranks), _Meetings())

    def _await_turn(self, rank: int, generators: _Generators) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == rank)
            self._waiting.pop(rank, None)
        generators.restore()

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            raise _WorldEnded

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; where none can, end all."""
        size = self.topology.world_size
        left = [other % size for other in range(rank + 1, rank + 1 + size) if other % size not in self._done]
        can_run = [other for other in left if other not in self._waiting or self._waiting[other][0]()]
        if left and not can_run and self._failure is None:
            waits = "; ".join(
                f"{self.topology.describe(other)} for {self._waiting[other][1]}" for other in sorted(left)
            )
            self._failure = RuntimeError(f"the ranks wait for each other, and would hang: {waits}")
        if left:
            self._turn = (can_run if self._failure is None else left)[0]
            self._condition.notify_all()

    def _groups(self, rank: int) -> Groups:
        at = self.topology.coordinate(rank)
        line = self.topology.pipeline_ranks(at)
        ends = sorted({line[0], line[-1]})

        def group(name: str, ranks: Sequence[int]) -> InProcessGroup:
            return InProcessGroup(self, name, tuple(sorted(ranks)), rank)

        return Groups(
            topology=self.topology,
            rank=rank,
            mesh=None,
            tensor=group("tensor", self.topology.tensor_ranks(at)),
            data=group("data", self.topology.data_ranks(at)),
            pipeline=group("pipeline", line),
            replica=group("replica", self.topology.replica_ranks(at)),
            ends=group("ends", ends) if rank in ends else None,
            world=group("world", range(self.topology.world_size)),
        )


def rank_in(group: dist.ProcessGroup, rank: int) -> int:
    """Find the number of a global rank among the ranks of a group."""
    return group.ranks.index(rank) if isinstance(group, InProcessGroup) else dist.get_group_rank(group, rank)


class _Generators:
    """Where the default generators stood: PyTorch's on the host, NumPy's and Python's."""

    def __init__(self) -> None:
        self._torch, self._others = states_of((torch.default_generator,)), HostState()

    def restore(self) -> None:
        """Put the generators back there."""
        go_to(self._torch)
        self._others.go_back()


@dataclass
class _Meeting:
    """One collective: what each member gave, by its number. `taken` counts the members that have the result."""

    kind: str
    given: dict[int, Any] = field(default_factory=dict)
    taken: int = 0


@dataclass
class _Meetings:
    """The collectives of one group, by their number, and its messages, by (source, destination)."""

    collectives: dict[int, _Meeting] = field(default_factory=dict)
    messages: dict[tuple[int, int], dict[int, Tensor]] = field(default_factory=dict)


class InProcessGroup(dist.ProcessGroup):
    """A process group of threads. A rank has an object of its own for each group that it is in."""

    def __init__(self, world: InProcessWorld, name: str, ranks: tuple[int, ...], rank: int) -> None:
        """
        Args:
            world: that the group belongs to.
            name: of the group, for messages.
            ranks: its global ranks, in order.
            rank: the global rank of this thread, one of them.
        """
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]  # the stubs know one of its forms
        self.ranks = ranks
        self._world, self._name, self._rank = world, name, rank
        self._member = ranks.index(rank)
        self._meetings = world.meetings(name, ranks)
        self._num_collectives = 0
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}

    def rank(self) -> int:
        return self._member

    def size(self) -> int:
        return len(self.ranks)

    # torch's functions call these, each in one of the forms that the stubs declare.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        reduce = next(call for op, call in _REDUCTIONS if opts.reduceOp == op)
        parts = self._meet(f"an all-reduce of {_shape(tensor)}", tensor.detach().clone())
        tensor.detach().copy_(reduce(torch.stack(parts)))
        return _Work()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        source = opts.rootRank
        given = tensor.detach().clone() if self._member == source else None
        found = self._meet(f"a broadcast of {_shape(tensor)} from rank {self.ranks[source]}", given)[source]
        tensor.detach().copy_(found)
        return _Work()

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (copies,), (tensor,) = outputs, inputs
        parts = self._meet(f"an all-gather of {_shape(tensor)}", tensor.detach().clone())
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part)
        return _Work()

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        parts = self._meet(f"an all-gather of {_shape(tensor)}", tensor.detach().clone())
        output.copy_(torch.cat(parts).view(output.shape))
        return _Work()

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        parts = self._meet(f"a reduce-scatter of {_shape(tensor)}", tensor.detach().clone())
        output.copy_(torch.stack(parts).sum(0).chunk(self.size())[self._member])
        return _Work()

    # What torch before 2.13 calls the two.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> dist.Work:
        self._meet("a barrier", None)
        return _Work()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        number = self._num_sent[dst] = self._num_sent.get(dst, -1) + 1
        self._messages(self._member, dst)[number] = tensor.detach().clone()
        return _Work()

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        number = self._num_received[src] = self._num_received.get(src, -1) + 1
        messages = self._messages(src, self._member)

        def receive() -> None:
            what = f"message {number} of rank {self.ranks[src]}, {_shape(tensor)}"
            self._world.wait(self._rank, lambda: number in messages, what)
            tensor.copy_(messages.pop(number))

        return _Work(lambda: number in messages, receive)

    def _messages(self, source: int, destination: int) -> dict[int, Tensor]:
        return self._meetings.messages.setdefault((source, destination), {})

    def _meet(self, kind: str, mine: Any) -> list[Any]:
        """Wait for all members, and return what each gave to its collective of the same number, in the group's order.

        Args:
            kind: of the collective, in words.
            mine: what this member gives.

        Raises:
            RuntimeError: another member calls another collective.
        """
        number, self._num_collectives = self._num_collectives, self._num_collectives + 1
        meeting = self._meetings.collectives.setdefault(number, _Meeting(kind))
        if meeting.kind != kind:
            first = self.ranks[next(iter(meeting.given))]
            raise RuntimeError(
                f"ranks of the {self._name} group {list(self.ranks)} call different collectives, and would hang or mix "
                f"up values: rank {first} {meeting.kind}, rank {self._rank} {kind}"
            )
        meeting.given[self._member] = mine
        self._world.wait(
            self._rank, lambda: len(meeting.given) == self.size(), f"{kind} over the {self._name} group {self.ranks}"
        )
        meeting.taken += 1
        if meeting.taken == self.size():
            del self._meetings.collectives[number]
        return [meeting.given[member] for member in range(self.size())]


class _Work(dist.Work):
    """What was done already, or a message under way."""

    def __init__(
        self, is_completed: Callable[[], bool] | None = None, finish: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            is_completed: tells whether the work is done; None if it is.
            finish: does the rest of it; None if there is none.
        """
        super().__init__()
        self._is_completed, self._finish = is_completed, finish

    def is_completed(self) -> bool:
        return self._is_completed is None or self._is_completed()

    def wait(self, timeout: Any = None) -> bool:
        if self._finish is not None:
            self._finish()
            self._is_completed = self._finish = None
        return True


_REDUCTIONS: tuple[tuple[dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda parts: parts.sum(0)),
    (dist.ReduceOp.MAX, lambda parts: parts.amax(0)),
    (dist.ReduceOp.MIN, lambda parts: parts.amin(0)),
)


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
