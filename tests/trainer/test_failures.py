"""One rank fails: all processes end, with its words, and nothing half done is left (PO-23)."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.spmd import PoolEnvironment, warm_pool
from tests.trainer.failing_job import PLACES, job

CHECKOUT = Path(__file__).parents[2]
WORLD_SIZE = 4
LIMIT_S = 30.0  # from the error to the end of the last process

# Where the failure was, beside its text; a loader or a callback belongs to no stage.
WORDS = {
    "training_step": "(pipeline rank 1, replica 0, tensor rank 0), stage 1, microbatch 1 of 2",
    "checkpoint on exceptions": "(pipeline rank 1, replica 0, tensor rank 0), stage 1, microbatch 1 of 2",
    "loader worker": "first failure: rank",
    "callback": "first failure: rank 1 (pipeline rank 1, replica 1, tensor rank 0)",
}


@pytest.mark.slow
def test_script_ends_by_itself_and_tells_what_failed(tmp_path):
    """As users start it, by Lightning's own launcher."""
    script = Path(__file__).with_name("failing_job.py")
    code, output = run_script([sys.executable, str(script), PLACES[0], str(tmp_path)], tmp_path)
    assert code != 0
    assert seconds_since_the_error(tmp_path) < LIMIT_S
    assert "ValueError: bad sample 17" in output
    assert WORDS[PLACES[0]] in output


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES[1:])
def test_every_process_ends_and_tells_what_failed(place, tmp_path):
    codes, output = run_processes(place, tmp_path)
    assert 0 not in codes
    assert seconds_since_the_error(tmp_path) < LIMIT_S
    assert output.count("bad sample 17") >= WORLD_SIZE, "each process names the cause"
    assert WORDS[place] in output
    assert list(tmp_path.glob("*.ckpt")) == []


def run_script(command, folder):
    """Exit code and output; returns when the last process has closed the output."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=300.0)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    return child.returncode, output


def run_processes(place, folder):
    """Exit codes and output of processes that need not import first: the fork server of the pool has done so."""
    warm_pool()
    context = get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [context.Process(target=be_rank, args=(r, store.port, place, str(folder))) for r in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    output = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("output-*")))
    return [process.exitcode for process in processes], output


def be_rank(rank, port, place, folder):
    """Train as one rank until the job fails; all output goes to a file."""
    with Path(folder, f"output-{rank}").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(folder)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": str(rank)})
    job(place, folder, plugins=[PoolEnvironment()])


def seconds_since_the_error(folder):
    return time.time() - float(Path(folder, "raised").read_text())
