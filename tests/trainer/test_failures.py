"""One rank fails: all processes end, with its words, and nothing half done is left (PO-23)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import run_processes
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
    codes, output = run_processes(job, place, folder=tmp_path)
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


def seconds_since_the_error(folder):
    return time.time() - float(Path(folder, "raised").read_text())
