"""The first failure of any rank ends them all, and every rank learns its cause.

A rank that fails writes the cause to a board (a key-value store on rank 0), once. A rank whose peer is gone sees only a
closed connection, or nothing at all; its watcher thread has read the board by then, and it adds the cause to its own
error. One that stays blocked in a collective is ended by its watcher. Rank 0 keeps the board open until all have read.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import broadcast_object
from lightning_ptdp.topology import Topology

log = logging.getLogger(__name__)

_KEY, _READERS = "lightning_ptdp/first_failure", "lightning_ptdp/readers"
_POLL_S = 0.25
_WAIT_FOR_CAUSE_S = 3.0
_WAIT_FOR_READERS_S = 5.0
_CONNECTION_WORDS = ("closed by peer", "gloo", "nccl", "timed out", "connection reset", "broken pipe")


class FailureBoard:
    """Where ranks post the first failure. A context for one run: its watcher lives from entry to exit."""

    def __init__(self, topology: Topology, rank: int, host: str, world: ProcessGroup, grace_s: float = 10.0) -> None:
        """Open the board; every rank of the world must.

        Args:
            topology: of the run.
            rank: global rank of this process.
            host: an address of rank 0 that all ranks reach.
            world: the group of all ranks.
            grace_s: seconds for which a rank may stay blocked after a peer failed.
        """
        self._topology, self._rank, self._grace_s = topology, rank, grace_s
        self._stop = threading.Event()
        self._run = 0
        self._watcher: threading.Thread | None = None
        self._cause: str | None = None
        self._reported: BaseException | None = None
        self._store: dist.TCPStore | None = None
        if topology.world_size > 1:
            timeout = timedelta(seconds=60)
            if rank == 0:
                self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            port = broadcast_object(self._store.port if self._store else None, 0, world)
            if self._store is None:
                self._store = dist.TCPStore(host, port, is_master=False, timeout=timeout)

    def __enter__(self) -> FailureBoard:
        if self._store is not None and self._watcher is None:
            self._run += 1
            self._cause = self._reported = None
            self._stop.clear()
            self._watcher = threading.Thread(target=self._watch, name="ptdp-failure-watcher", daemon=True)
            self._watcher.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None = None, __: BaseException | None = None, ___: TracebackType | None = None
    ) -> None:
        if self._reported is not None and self._rank == 0:
            self._wait_for_readers()
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        self._watcher = None

    def report(self, error: BaseException) -> None:
        """Post this rank's failure if it is the first; otherwise say in `error` which one was."""
        if self._store is None or self._reported is error:
            return
        self._reported = error
        is_consequence = _is_connection_error(error)
        cause = self._read(wait_s=_WAIT_FOR_CAUSE_S if is_consequence else 0.0)
        if cause is None:
            text = f"{self._topology.describe(self._rank)}: {_in_words(error)}"
            if is_consequence:
                text += " (no rank posted a cause: was a process killed, by want of memory perhaps?)"
            cause = self._post(text)
            if cause == text and not is_consequence:
                is_placed = any(note.startswith("raised on") for note in getattr(error, "__notes__", ()))
                if self._watcher is not None and not is_placed:  # within a run, not at its set-up
                    error.add_note(f"raised on {self._topology.describe(self._rank)}")
                return
        if not cause.endswith(_in_words(error)):  # a refusal is raised on every rank, in the same words
            error.add_note(f"first failure: {cause}")

    def _post(self, text: str) -> str:
        """Write unless something is written, and count as a reader; returns what is written."""
        assert self._store is not None, "only several ranks have a board"
        try:
            cause = bytes(self._store.compare_set(self._named(_KEY), "", text)).decode()
        except dist.DistError:
            return text
        self._look()
        return cause

    def _read(self, wait_s: float = 0.0) -> str | None:
        deadline = time.monotonic() + wait_s
        while self._cause is None and not self._look() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._cause

    def _look(self) -> bool:
        """Read the board; False when nothing is written, or rank 0 is gone."""
        assert self._store is not None, "only several ranks have a board"
        try:
            if not self._store.check([self._named(_KEY)]):
                return False
            cause = bytes(self._store.get(self._named(_KEY))).decode()
            if self._cause is None:
                self._cause = cause
                self._store.add(self._named(_READERS), 1)
        except dist.DistError:
            return False
        return True

    def _named(self, key: str) -> str:
        """The key of this run: a later one in the same processes starts with an empty board."""
        return f"{key}/{self._run}"

    def _wait_for_readers(self) -> None:
        assert self._store is not None, "only several ranks have a board"
        deadline = time.monotonic() + _WAIT_FOR_READERS_S
        while self._store.add(self._named(_READERS), 0) < self._topology.world_size and time.monotonic() < deadline:
            time.sleep(0.05)

    def _watch(self) -> None:
        """End the process if a peer failed and this rank stays blocked."""
        while not self._stop.wait(_POLL_S):
            if not self._look():
                continue
            if self._stop.wait(self._grace_s):
                return
            sys.stderr.write(
                f"{self._topology.describe(self._rank)} was still blocked {self._grace_s:.0f} s after a failure "
                f"elsewhere, and ends.\nfirst failure: {self._cause}\n"
            )
            sys.stderr.flush()
            os._exit(1)


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _CONNECTION_WORDS)


def _in_words(error: BaseException) -> str:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"
