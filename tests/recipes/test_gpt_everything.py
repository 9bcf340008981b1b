"""The GPT recipe with everything on, tensor 2 x pipeline 2 x 2 chunks x data 2, gives the run of one process."""

import csv
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning_ptdp.recipes.gpt import GPTModule

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd

EVERYTHING = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "virtual_pipeline_size": 2,
    "data_parallel_size": 2,
    "micro_batch_size": 1,
    "sequence_parallel": True,
}


class Texts(ReplicaBatches):
    """Batches to train on and to validate, of which each replica takes its rows."""

    def __init__(self):
        named = [texts(8, seed=i, vocabulary=61) for i in range(6)]
        super().__init__([{"input_ids": batch["ids"], "labels": batch["labels"]} for batch in named])

    def train_dataloader(self):
        return self._mine(self.batches[:5])

    def val_dataloader(self):
        return self._mine(self.batches[5:])

    def _mine(self, batches):
        held, self.batches = self.batches, batches
        loader = super().train_dataloader()
        self.batches = held
        return loader


def project(folder, strategy):
    """A user's script, with a strategy or without."""
    seed_everything()
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log")  # of the world around a lone device
    best = ModelCheckpoint(folder, filename="{epoch}-{val_loss:.4f}", monitor="val_loss", save_last=True)
    stopping = EarlyStopping("val_loss", patience=1)
    trainer = quiet_trainer(
        "auto" if strategy is None else PTDPStrategy(**strategy),
        precision="64-true",
        max_epochs=3,
        log_every_n_steps=1,
        gradient_clip_val=0.3,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[best, stopping, LearningRateMonitor(), GradientAccumulationScheduler({0: 2, 1: 1})],
        enable_checkpointing=True,
    )
    sizes = {"vocab_size": 61, "max_seq_len": 16, "num_layers": 4, "hidden_size": 16, "num_heads": 4}
    trainer.fit(GPTModule(**sizes, learning_rate=1e-2, warmup_steps=2), datamodule=Texts())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return (
        metrics,
        Path(best.best_model_path).name,
        (stopping.stopped_epoch, trainer.current_epoch, trainer.global_step),
    )


@pytest.mark.slow
def test_everything_together_changes_no_number(tmp_path):
    folders = [str(tmp_path / name) for name in ("plain", "ptdp")]
    (one,) = run_spmd(project, world_size=1, folder=folders[0], strategy=None, timeout=60.0)
    for metrics, best, progress in run_spmd(
        project, world_size=8, folder=folders[1], strategy=EVERYTHING, timeout=200.0
    ):
        assert metrics == pytest.approx(one[0], abs=1e-8)
        assert (best, progress) == one[1:]
    plain, mine = (rows(folder) for folder in folders)
    assert len(mine) == len(plain)
    for row, expected in zip(mine, plain, strict=True):
        assert row == pytest.approx(expected, abs=1e-8)


def rows(folder):
    """What the logger wrote, as numbers."""
    with Path(folder, "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
