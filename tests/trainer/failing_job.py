"""A script that trains on four processes and fails on one of them; tests/trainer/test_failures.py runs it.

python failing_job.py WHERE FOLDER          started by Lightning's own launcher
"""

import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, Rows, texts

PLACES = ("training_step", "loader worker", "callback", "checkpoint on exceptions")


def fail(folder: str) -> None:
    """Note when it was, and raise."""
    Path(folder, "raised").write_text(str(time.time()))
    raise ValueError("bad sample 17")


class FailingGPT(GPT):
    """Fails on stage 1 of replica 0, in its second step, on its second microbatch."""

    def __init__(self, folder: str, *, fails: bool) -> None:
        super().__init__()
        self.folder, self.fails, self.num_losses = folder, fails, 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)  # only the last stage comes back from the model
        self.num_losses += 1
        if self.fails and self.trainer.strategy.groups.at.data == 0 and self.num_losses == 4:
            fail(self.folder)
        return loss


class FailingRows(Rows):
    """Fails to load row 17."""

    def __init__(self, folder: str, *, fails: bool) -> None:
        super().__init__(texts(32))
        self.folder, self.fails = folder, fails

    def __getitem__(self, index):
        if self.fails and index == 17:
            fail(self.folder)
        return super().__getitem__(index)


class FailingCallback(Callback):
    """Fails after the first batch, on one rank."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_rank == 1:
            fail(self.folder)


def job(where: str, folder: str, **trainer) -> None:
    """Train for one epoch on four processes, p = 2 and d = 2."""
    warnings.simplefilter("ignore")
    callbacks = [FailingCallback(folder)] if where == "callback" else []
    if "checkpoint" in where:
        callbacks.append(OnExceptionCheckpoint(folder))
    loads_apart = where == "loader worker"
    rows = FailingRows(folder, fails=loads_apart)
    pl.seed_everything(0)
    pl.Trainer(
        strategy=PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1),
        accelerator="cpu",
        devices=4,
        max_epochs=1,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer,
    ).fit(
        FailingGPT(folder, fails=where in ("training_step", "checkpoint on exceptions")),
        DataLoader(
            rows, batch_size=2, **({"num_workers": 1, "multiprocessing_context": "fork"} if loads_apart else {})
        ),
    )


if __name__ == "__main__":
    job(*sys.argv[1:])
