"""Lets several programs run their steps in turns, so that all see the same machine.

Every rank of every contestant stays alive and waits at a gate before each step; the referee opens one contestant's
gates at a time, A B C, C B A, and so on. What is compared is the ratio of steps of one round.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

PORT, NAME = "PTDP_BENCH_PORT", "PTDP_BENCH_NAME"


class Gate:
    """A rank's side: `begin` waits for its turn and starts the clock, `end` stops it and reports."""

    def __init__(self) -> None:
        connection = socket.create_connection(("127.0.0.1", int(os.environ[PORT])))
        self._wire: TextIO = connection.makefile("rw")
        self._say(name=os.environ[NAME], pid=os.getpid())
        self._start, self._cpu = 0.0, 0.0

    def begin(self) -> None:
        """Wait until the referee opens the gate; ends the process when it closes the bench."""
        self._say(ready=True)
        if not self._wire.readline():
            os._exit(0)
        self._start, self._cpu = time.perf_counter(), time.process_time()

    def end(self, loss: float) -> None:
        """Report the step."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._say(
            seconds=time.perf_counter() - self._start, cpu=time.process_time() - self._cpu, loss=loss, peak_mib=peak
        )

    def _say(self, **what: Any) -> None:
        self._wire.write(json.dumps(what) + "\n")
        self._wire.flush()


@dataclass
class Contestant:
    """A program of several ranks, and what it reported: seconds are those of its slowest rank."""

    name: str
    num_ranks: int
    command: list[str]
    threads: int = 1
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    wires: list[TextIO] = field(default_factory=list)


class Referee:
    """Starts contestants and gives them their turns."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._programs: list[subprocess.Popen[bytes]] = []

    def start(self, contestant: Contestant, timeout_s: float = 180.0) -> None:
        """Start a contestant and wait until every rank has called.

        Raises:
            RuntimeError: it ended, or took too long.
        """
        port = self._server.getsockname()[1]
        threads = str(contestant.threads)
        environment = {**os.environ, PORT: str(port), NAME: contestant.name, "OMP_NUM_THREADS": threads}
        program = subprocess.Popen(
            contestant.command, env=environment, stdout=subprocess.DEVNULL, stderr=None, start_new_session=True
        )
        self._programs.append(program)
        deadline = time.monotonic() + timeout_s
        while len(contestant.wires) < contestant.num_ranks:
            if program.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{contestant.name} ended before its first step, or took over {timeout_s:.0f} s")
            if select.select([self._server], [], [], 0.5)[0]:
                wire = self._server.accept()[0].makefile("rw")
                _hear(wire)
                contestant.wires.append(wire)

    def turn(self, contestant: Contestant) -> None:
        """One step of a contestant, once every rank is at its gate."""
        for wire in contestant.wires:
            _hear(wire)
        for wire in contestant.wires:
            wire.write("go\n")
            wire.flush()
        reports = [_hear(wire) for wire in contestant.wires]
        contestant.seconds.append(max(report["seconds"] for report in reports))
        contestant.cpu.append(sum(report["cpu"] for report in reports))
        contestant.losses.append(reports[0]["loss"])
        contestant.peak_mib = max(report["peak_mib"] for report in reports)

    def close(self) -> None:
        """End all programs."""
        for program in self._programs:
            if program.poll() is None:
                os.killpg(program.pid, 9)
            program.wait()
        self._server.close()


def _hear(wire: TextIO) -> dict[str, Any]:
    line = wire.readline()
    if not line:
        raise RuntimeError("a contestant ended in the middle of a step; its error is above")
    heard: dict[str, Any] = json.loads(line)
    return heard


def run(contestants: list[Contestant], rounds: int, progress: Any = None) -> None:
    """Start all, then give each `rounds` turns, in alternating order."""
    referee = Referee()
    try:
        for contestant in contestants:
            print(f"starting {contestant.name}", file=sys.stderr, flush=True)
            referee.start(contestant)
        for i in range(rounds):
            for contestant in contestants if i % 2 == 0 else contestants[::-1]:
                referee.turn(contestant)
            if progress is not None:
                progress(i + 1)
    finally:
        referee.close()
