"""The near side of the pool: starts workers, sends them bodies, collects results, and tells what went wrong.

Workers are forked by a server that imports torch and Lightning once. Every body gets a world of its own. The first
rank that fails decides: its traceback is reported with the place where each other rank stood, the workers of that
world are ended, and the next body finds fresh ones.
"""

import atexit
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from tests import spmd_worker
from tests.spmd_worker import DUMP_SIGNAL, Done, Failed, Job, Order, Pipe, from_bytes, serve, to_bytes

PRELOADED = ["torch", "torch.distributed", "lightning.pytorch", "pytest"]
START_LIMIT = 120.0  # seconds for the fork server's imports, on a machine that does other things too
GRACE = 0.2  # seconds for the other ranks after the first failure: whether all fail alike is half of the diagnosis

# What workers start with, whatever the test that happens to start them has set.
ENVIRONMENT = dict(os.environ)

Body = Callable[..., Any]


class SpmdError(AssertionError):
    """What went wrong on the ranks of one world."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of the pool, as the parent sees it."""

    rank: int
    process: BaseProcess
    pipe: Pipe
    output: TextIO


class Pool:
    """Workers 0, 1, ..., of which a world of size w takes the first w."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(PRELOADED)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="spmd-")
        self._workers: dict[int, Worker] = {}
        self._num_worlds = 0
        self._num_started = 0
        atexit.register(self.close)  # else multiprocessing would wait for the workers for ever

    def run(self, body: Body, world_size: int, timeout: float, kwargs: dict[str, Any]) -> list[Any]:
        """Run a body on every rank of a fresh world, as `tests.spmd.run_spmd` promises."""
        __tracebackhide__ = True
        check_sendable(body)
        self._num_worlds += 1
        job = Job(
            world=f"world-{self._num_worlds}",
            world_size=world_size,
            module=body.__module__,
            name=body.__name__,
            kwargs=_arguments_to_bytes(kwargs),
            folder=os.getcwd(),
            timeout=timeout,
        )
        workers = self._take(world_size)
        deadline = time.monotonic() + timeout
        try:
            results = _exchange(workers, job, job, deadline)
            _exchange(workers, Order.END_WORLD, job, deadline)
        except BaseException:  # KeyboardInterrupt too: these ranks are in the middle of something
            self._discard(workers)
            raise
        _print_output(workers)
        return [from_bytes(done.result) for done in results]

    def warm(self) -> None:
        """Start the fork server, which imports while the caller goes on."""
        forkserver.ensure_running()

    def close(self) -> None:
        """End all workers and remove their folder."""
        atexit.unregister(self.close)
        workers = list(self._workers.values())
        for worker in workers:
            _send(worker, Order.QUIT)
        for worker in workers:
            worker.process.join(1.0)
        self._discard(workers)
        self._folder.cleanup()

    def _take(self, world_size: int) -> list[Worker]:
        """The first workers, alive and waiting; those that are missing are started together."""
        dead = [worker for worker in self._workers.values() if not worker.process.is_alive()]
        self._discard(dead)
        missing = [self._start(rank) for rank in range(world_size) if rank not in self._workers]
        for worker in missing:
            if not worker.pipe.poll(START_LIMIT):
                self._discard(missing)
                raise RuntimeError(
                    f"a worker must be up within {START_LIMIT:.0f} s; rank {worker.rank} is not; "
                    f"see what else runs on this machine, or whether {', '.join(PRELOADED)} can be imported"
                )
            worker.pipe.recv()
        return [self._workers[rank] for rank in range(world_size)]

    def _start(self, rank: int) -> Worker:
        self._num_started += 1
        output = Path(self._folder.name) / f"worker-{self._num_started}"
        output.touch()
        near, far = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(rank, far, self._store.port, ENVIRONMENT, output), name=f"spmd-rank-{rank}"
        )
        process.start()
        far.close()
        self._workers[rank] = Worker(rank, process, near, output.open(errors="replace"))
        return self._workers[rank]

    def _discard(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
            worker.output.close()
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


def _exchange(workers: list[Worker], message: Job | Order, job: Job, deadline: float) -> list[Done]:
    """Tell all ranks something and wait until all have done it, or raise what went wrong first."""
    __tracebackhide__ = True
    for worker in workers:
        _send(worker, message)
    answers = _collect(workers, deadline)
    done = [answer for answer in answers.values() if isinstance(answer, Done)]
    if len(done) < len(workers):
        raise SpmdError(_report(workers, answers, job))
    return [answers[rank] for rank in range(len(workers))]  # all are Done


def _collect(workers: list[Worker], deadline: float) -> dict[int, Done | Failed]:
    """What each rank answered before the deadline, or shortly after the first failure."""
    pending = {worker.pipe: worker for worker in workers}
    answers: dict[int, Done | Failed] = {}
    failed = False
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            worker = pending.pop(pipe)  # it was asked about pipes only
            answers[worker.rank] = _receive(worker)
        if not failed and any(isinstance(answer, Failed) for answer in answers.values()):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _send(worker: Worker, message: Job | Order) -> None:
    with suppress(OSError):  # it has died, and says so where an answer is expected
        worker.pipe.send(message)


def _receive(worker: Worker) -> Done | Failed:
    try:
        answer: Done | Failed = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(1.0)
        return Failed(f"the process died with exit code {worker.process.exitcode}\n", moment=0.0)  # a cause, no effect
    return answer


def _report(workers: list[Worker], answers: dict[int, Done | Failed], job: Job) -> str:
    """The first failure, then every other rank in turn."""
    body = f"{job.module}.{job.name}"
    failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}
    hanging = [worker for worker in workers if worker.rank not in answers]
    if failures:
        first = min(failures, key=lambda rank: failures[rank].moment)
        parts = [f"rank {first} of {len(workers)} failed in {body}:\n\n{failures.pop(first).report}"]
    else:
        first = -1
        ranks = ", ".join(str(worker.rank) for worker in hanging)
        parts = [f"ranks {ranks} of {len(workers)} still in {body} after the limit of {job.timeout:g} s\n"]
    _print_output(workers)
    stacks = _dump(hanging)
    for worker in workers:
        if worker.rank in stacks:
            parts.append(f"--- rank {worker.rank} stood here, innermost call first:\n{stacks[worker.rank]}")
        elif worker.rank in failures:
            parts.append(f"--- rank {worker.rank} failed too:\n{failures[worker.rank].report}")
        elif worker.rank != first:
            parts.append(f"--- rank {worker.rank} was through\n")
    return "\n".join(parts).rstrip()


def _dump(workers: list[Worker]) -> dict[int, str]:
    """Make the ranks dump their stacks, of which they die, and read the part above the worker's own frames."""
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid or 0, DUMP_SIGNAL)
    stacks = {}
    for worker in workers:
        worker.process.join(5.0)
        lines = worker.output.read().splitlines(keepends=True)
        stacks[worker.rank] = "".join(lines[: _first(lines, spmd_worker.__file__)])
    return stacks


def _first(lines: list[str], word: str) -> int:
    return next((index for index, line in enumerate(lines) if word in line), len(lines))


def _print_output(workers: list[Worker]) -> None:
    """Print what the ranks printed since the last time, for pytest to capture with the test."""
    for worker in workers:
        if text := worker.output.read():
            print(f"--- rank {worker.rank} printed:\n{text}", end="")
