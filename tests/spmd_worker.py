"""The far side of the pool of tests/spmd.py: one process that plays one rank, world after world."""

import faulthandler
import gc
import importlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from tests.host_warnings import warnings_as_errors
from tests.hygiene import Surroundings, seed_everything, unraisable_errors

DUMP_SIGNAL = signal.SIGUSR1

Pipe: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True, slots=True)
class Job:
    """One body to run as one rank of one world.

    world: name of the world, never used twice. module, name: where the body is. kwargs: its arguments, by `to_bytes`.
    folder: working directory. timeout: seconds until the parent gives up.
    """

    world: str
    world_size: int
    module: str
    name: str
    kwargs: bytes
    folder: str
    timeout: float


class Order(Enum):
    """What the parent says besides a job."""

    END_WORLD = auto()
    QUIT = auto()


@dataclass(frozen=True, slots=True)
class Done:
    """The rank did what it was told, and waits."""

    result: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank cannot go on. moment: on the clock that all processes share."""

    report: str
    moment: float


class LeakError(AssertionError):
    """A body left something behind."""


def to_bytes(value: object) -> bytes:
    """Serialise a value so that the reader shares no memory with the writer."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(value: bytes) -> Any:
    """Read what `to_bytes` wrote."""
    return torch.load(io.BytesIO(value), weights_only=False)


def serve(rank: int, pipe: Pipe, port: int, environment: dict[str, str], output: Path) -> None:
    """Run jobs as `rank` until the parent says QUIT or goes away.

    A job has two phases, each answered by Done: the body and, when the parent has heard that all ranks are through
    with theirs, the end of the world. So the parent is the barrier, and knows who has not reached it.

    Args:
        rank: the rank in every world.
        pipe: to the parent.
        port: of the parent's TCPStore.
        environment: the variables to start with.
        output: file for all that this process prints, and for the stacks that it dumps on DUMP_SIGNAL.
    """
    _redirect(output)
    _settle(rank, environment)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    _tell(pipe, Done())
    while isinstance(job := _hear(pipe), Job):
        # Ends a worker that hangs in a body after its parent was killed; a living parent is always faster.
        faulthandler.dump_traceback_later(job.timeout + 10.0, exit=True)
        _play(rank, job, store, pipe)
        faulthandler.cancel_dump_traceback_later()


def _redirect(output: Path) -> None:
    """Send both streams to a file, so that the parent can tell which rank printed what."""
    with output.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # a rank that hangs is killed, and its last lines tell most
    # chain: the worker dumps its stacks, then dies of the signal, so the dump that the parent reads is whole.
    faulthandler.register(DUMP_SIGNAL, file=sys.stderr, all_threads=True, chain=True)


def _settle(rank: int, environment: dict[str, str]) -> None:
    """Make the process what every body expects."""
    os.environ.clear()
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning's launcher sets it, and the body would seem to leak it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank_zero_only.rank = rank  # Lightning reads RANK once, when it is imported: in the fork server there is none
    gc.freeze()  # keeps collections from walking, and so copying, what the fork server imported


def _play(rank: int, job: Job, store: dist.Store, pipe: Pipe) -> None:
    """Be one rank of one world, from its birth to its end."""
    try:
        with _world(rank, job, store):
            _tell(pipe, Done(_run(job)))
            _hear(pipe)
    except BaseException as error:
        _tell(pipe, Failed(_traceback(error), time.monotonic()))
    else:
        _tell(pipe, Done())


@contextmanager
def _world(rank: int, job: Job, store: dist.Store) -> Iterator[None]:
    """A process group, and what a launcher would have set, for the time of one job.

    The group outlives an error: closing it would make the other ranks fail too, and hide where they stood.
    """
    variables = {"RANK": str(rank), "WORLD_SIZE": str(job.world_size), "LOCAL_RANK": str(rank)}
    patience = timedelta(seconds=job.timeout + 10.0)  # the pool's limit ends first, and tells more
    with chdir(job.folder), patch.dict(os.environ, variables), warnings_as_errors():
        prefixed = dist.PrefixStore(job.world, store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=job.world_size, timeout=patience)
        seed_everything()
        yield
        dist.destroy_process_group()


def _run(job: Job) -> bytes:
    """Run the body, see that it leaves nothing behind, and return its result."""
    before = Surroundings.observe()
    with unraisable_errors() as unraisable:
        body = _find(job)
        gc.freeze()  # what earlier jobs and imports left need not be walked again
        result = to_bytes(body(**from_bytes(job.kwargs)))
        gc.collect()  # ends what only cycles keep alive: files, sockets, loader processes
    if leaks := [*before.restore(), *unraisable]:
        raise LeakError(f"{job.name} left behind\n  " + "\n  ".join(leaks))
    return result


def _find(job: Job) -> Callable[..., object]:
    """Import a body by its name; the body of a test made by @spmd hangs on the test."""
    found = getattr(importlib.import_module(job.module), job.name)
    return cast(Callable[..., object], getattr(found, "spmd_body", found))


def _traceback(error: BaseException) -> str:
    """The traceback below this file, or all of it where the error came from here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _tell(pipe: Pipe, message: Done | Failed) -> None:
    with suppress(BrokenPipeError):  # the parent is gone; `_hear` will say so
        pipe.send(message)


def _hear(pipe: Pipe) -> Job | Order:
    try:
        return cast(Job | Order, pipe.recv())
    except EOFError:  # the parent is gone
        return Order.QUIT
