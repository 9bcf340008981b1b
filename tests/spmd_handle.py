"""One worker of the pool, as this process sees it: start it, talk to it, make it say where it stands, end it."""

import os
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

from tests import spmd_worker
from tests.spmd_worker import DUMP_SIGNAL, Done, Failed, Job, Order, Pipe, serve

START_LIMIT = 120.0  # seconds for the fork server's imports, on a machine that does other things too

# What workers start with, whatever the test that happens to start them has set.
ENVIRONMENT = dict(os.environ)


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that plays one rank. output: what it prints, read up to what was taken."""

    rank: int
    process: BaseProcess
    pipe: Pipe
    output: TextIO

    @classmethod
    def start(cls, rank: int, port: int, output: Path) -> "Worker":
        """Fork a worker from the server; it is of use when `wait_until_up` has returned."""
        output.touch()
        context = get_context("forkserver")
        near, far = context.Pipe()
        process = context.Process(target=serve, args=(rank, far, port, ENVIRONMENT, output), name=f"spmd-rank-{rank}")
        process.start()
        far.close()
        return cls(rank, process, near, output.open(errors="replace"))

    def wait_until_up(self) -> None:
        """Wait for the first message, or raise RuntimeError."""
        if not self.pipe.poll(START_LIMIT):
            raise RuntimeError(
                f"a worker must be up within {START_LIMIT:.0f} s, and rank {self.rank} is not; "
                f"see what else keeps this machine busy"
            )
        match self.receive():
            case Failed(report):
                raise RuntimeError(f"rank {self.rank} did not start: {report}{self.take_output()}")

    def send(self, message: Job | Order) -> None:
        """Send a message; a worker that has died says so where its answer is expected."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> Done | Failed:
        """The answer that is there, or that the process has died."""
        try:
            answer: Done | Failed = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            report = f"the process died with exit code {self.process.exitcode}\n"
            return Failed(report, moment=0.0)  # before all others: they fail because of it
        return answer

    def take_output(self) -> str:
        """What the worker printed since the last time."""
        return self.output.read()

    def ask_for_stacks(self) -> None:
        """Make the worker dump its stacks, of which it dies."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, DUMP_SIGNAL)

    def take_stacks(self) -> str:
        """What `ask_for_stacks` brought, innermost call first, down to the body."""
        self.process.join(5.0)
        lines = self.take_output().splitlines(keepends=True)
        end = next((number for number, line in enumerate(lines) if spmd_worker.__file__ in line), len(lines))
        return "".join(lines[:end])

    def end(self) -> None:
        """Kill the process if it is still there, and close what leads to it."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.output.close()
