"""Steps that a pipeline cannot run are refused on the first batch: every process ends, and names what is at fault."""

import time
import warnings
from pathlib import Path

import pytest
from torch.utils.checkpoint import checkpoint

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.processes import run_processes

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
    codes, _ = run_processes(job, name, folder=tmp_path, world_size=WORLD_SIZE)
    seconds = time.time() - float((tmp_path / "begun").read_text())
    assert 0 not in codes
    for rank in range(WORLD_SIZE):
        assert STEPS[name][1] in (tmp_path / f"output-{rank}").read_text(errors="replace")
    assert seconds < LIMIT_S


def job(name, folder, plugins):
    """Train as one of two stages until the step is refused; note when the first batch began."""
    warnings.simplefilter("ignore")
    module = STEPS[name][0]()
    module.on_train_batch_start = lambda *_: Path(folder, "begun").write_text(str(time.time())) and None
    strategy = PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=2)
    quiet_trainer(strategy, plugins=plugins).fit(module, datamodule=ReplicaBatches([texts(4)]))
