"""Steps that a pipeline cannot run are refused on the first batch: every process ends, and names what is at fault."""

import os
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import warm_pool

WORLD_SIZE = 2
LIMIT_S = 10.0


class WithoutTheModel(GPT):
    """Its loss needs no block."""

    def loss(self, batch):
        return (self.head.weight**2).sum()


class Twice(GPT):
    """Calls the model again."""

    def loss(self, batch):
        return super().loss(batch) + super().loss(batch)


class ManyLosses(GPT):
    """Returns two numbers."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch).repeat(2)


class Reentrant(GPT):
    """Checkpoints blocks in the old way."""

    def forward(self, ids, positions=None, is_real=None):
        x = self.token(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


STEPS = {
    "never calls the model": (WithoutTheModel, "the step returned after 0 of the 4 blocks of 'blocks'"),
    "calls it twice": (Twice, "the step calls the model a second time"),
    "returns two numbers": (ManyLosses, "training_step must return a loss of one number"),
    "checkpoints with reentry": (Reentrant, "use_reentrant=False"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_step_is_refused_on_the_first_batch(name, tmp_path):
    codes, outputs, seconds = run_processes(name, tmp_path)
    assert 0 not in codes
    for output in outputs:
        assert STEPS[name][1] in output
    assert seconds < LIMIT_S


def run_processes(name, folder):
    """Exit codes, outputs, and seconds from the first batch to the last end."""
    warm_pool()
    context = get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [context.Process(target=be_rank, args=(r, store.port, name, str(folder))) for r in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    end, begin = time.time(), float(Path(folder, "begun").read_text())
    outputs = [Path(folder, f"output-{rank}").read_text(errors="replace") for rank in range(WORLD_SIZE)]
    return [process.exitcode for process in processes], outputs, end - begin


def be_rank(rank, port, name, folder):
    """Train as one of two stages until the step is refused; all output goes to a file."""
    with Path(folder, f"output-{rank}").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": str(rank)})
    warnings.simplefilter("ignore")
    module = STEPS[name][0]()
    module.on_train_batch_start = lambda *_: Path(folder, "begun").write_text(str(time.time())) and None
    strategy = PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=2)
    quiet_trainer(strategy).fit(module, datamodule=ReplicaBatches([texts(4)]))
