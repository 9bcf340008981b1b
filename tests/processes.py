"""Processes of their own for jobs that end them: the pool's ranks must live on.

They are forked from the pool's server, which has imported what takes long.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.spmd import PoolEnvironment, warm_pool

Job = Callable[..., Any]


def run_processes(
    job: Job, *arguments: Any, folder: Path, world_size: int = 4, limit_s: float = 60.0
) -> tuple[list[int | None], str]:
    """Exit codes, and what all ranks printed, of `job(*arguments, folder, plugins=...)` on every rank of a world.

    job: a module-level function. limit_s: after which processes are killed.
    """
    warm_pool()
    context = get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_be_rank, args=(rank, world_size, store.port, job, arguments, str(folder)))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    output = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("output-*")))
    return [process.exitcode for process in processes], output


def _be_rank(rank: int, world_size: int, port: int, job: Job, arguments: tuple[Any, ...], folder: str) -> None:
    with Path(folder, f"output-{rank}").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(folder)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=100))
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)})
    job(*arguments, folder, plugins=[PoolEnvironment()])
