"""The pool: keeps workers from test to test, gives each body a world of its own, and collects what ranks return.

Workers are forked by a server that imports torch and Lightning once. The first rank that fails decides: its traceback
is reported with the place where each other rank stood, the workers of that world are ended, and the next body finds
fresh ones.
"""

import atexit
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.spmd_handle import Worker
from tests.spmd_report import report
from tests.spmd_worker import Done, Failed, Job, Order, from_bytes, to_bytes

PRELOADED = ["torch", "torch.distributed", "lightning.pytorch", "pytest"]
GRACE = 0.2  # seconds for the other ranks after the first failure: whether all fail alike is half of the diagnosis

Body = Callable[..., Any]


class SpmdError(AssertionError):
    """What went wrong on the ranks of one world."""


class Pool:
    """Workers 0, 1, ..., of which a world of size w takes the first w."""

    def __init__(self) -> None:
        forkserver.set_forkserver_preload(PRELOADED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="spmd-")
        self._workers: dict[int, Worker] = {}
        self._num_started = 0
        self._num_worlds = 0
        atexit.register(self.close)  # else multiprocessing would wait for the workers for ever

    def run(self, body: Body, world_size: int, timeout: float, kwargs: dict[str, Any]) -> list[Any]:
        """Run a body on every rank of a fresh world, as `tests.spmd.run_spmd` promises."""
        __tracebackhide__ = True
        job = self._job(body, world_size, timeout, kwargs)
        workers = self._take(world_size)
        deadline = time.monotonic() + timeout
        try:
            results = _exchange(job, workers, job, deadline)
            _exchange(Order.END_WORLD, workers, job, deadline)
        except BaseException:  # KeyboardInterrupt too: these ranks are in the middle of something
            self._discard(workers)
            raise
        _print_output(workers)
        return [from_bytes(result) for result in results]

    def warm(self) -> None:
        """Start the fork server, which imports while the caller goes on."""
        forkserver.ensure_running()

    def close(self) -> None:
        """End all workers and remove their folder."""
        atexit.unregister(self.close)
        workers = list(self._workers.values())
        for worker in workers:
            worker.send(Order.QUIT)
        for worker in workers:
            worker.process.join(1.0)
        self._discard(workers)
        self._folder.cleanup()

    def _job(self, body: Body, world_size: int, timeout: float, kwargs: dict[str, Any]) -> Job:
        check_sendable(body)
        self._num_worlds += 1
        return Job(
            world=f"world-{self._num_worlds}",
            world_size=world_size,
            module=body.__module__,
            name=body.__name__,
            kwargs=_arguments_to_bytes(kwargs),
            folder=os.getcwd(),
            timeout=timeout,
        )

    def _take(self, world_size: int) -> list[Worker]:
        """The first workers, alive and waiting; those that are missing start side by side."""
        self._discard([worker for worker in self._workers.values() if not worker.process.is_alive()])
        missing = [rank for rank in range(world_size) if rank not in self._workers]
        try:
            for rank in missing:
                self._start(rank)
            for rank in missing:
                self._workers[rank].wait_until_up()
        except BaseException:
            self._discard([self._workers[rank] for rank in missing if rank in self._workers])
            raise
        return [self._workers[rank] for rank in range(world_size)]

    def _start(self, rank: int) -> None:
        self._num_started += 1
        output = Path(self._folder.name) / f"worker-{self._num_started}"
        self._workers[rank] = Worker.start(rank, self._store.port, output)

    def _discard(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.end()
            del self._workers[worker.rank]


def check_sendable(body: Body) -> None:
    """Refuse a body that a worker could not import by its name."""
    if body.__qualname__ != body.__name__ or body.__module__ == "__main__":
        raise ValueError(
            f"workers import a body by name, so it must be a function at the top level of an importable module; "
            f"got {body.__module__}.{body.__qualname__}; move it there, and pass what it closes over as arguments"
        )


def _arguments_to_bytes(kwargs: dict[str, Any]) -> bytes:
    try:
        return to_bytes(kwargs)
    except Exception as error:
        raise ValueError(
            f"arguments travel to the workers by torch.save, and one of {sorted(kwargs)} cannot; "
            f"pass plain values, and make the rest in the body"
        ) from error


def _exchange(message: Job | Order, workers: list[Worker], job: Job, deadline: float) -> list[bytes]:
    """Tell all ranks something and wait until all have done it, or raise what went wrong first."""
    __tracebackhide__ = True
    for worker in workers:
        worker.send(message)
    answers = _collect(workers, deadline)
    results = [answer.result for _, answer in sorted(answers.items()) if isinstance(answer, Done)]
    if len(results) < len(workers):
        _print_output(workers)
        raise SpmdError(report(job, workers, answers))
    return results


def _collect(workers: list[Worker], deadline: float) -> dict[int, Done | Failed]:
    """What each rank answered before the deadline, or shortly after the first failure."""
    pending: dict[object, Worker] = {worker.pipe: worker for worker in workers}
    answers: dict[int, Done | Failed] = {}
    some_failed = False
    while pending and (ready := wait([worker.pipe for worker in pending.values()], deadline - time.monotonic())):
        for pipe in ready:
            worker = pending.pop(pipe)
            answers[worker.rank] = worker.receive()
        if not some_failed and any(isinstance(answer, Failed) for answer in answers.values()):
            some_failed = True
            deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _print_output(workers: list[Worker]) -> None:
    """Print what the ranks printed since the last time, for pytest to capture with the test."""
    for worker in workers:
        if text := worker.take_output():
            print(f"--- rank {worker.rank} printed:\n{text}", end="")
