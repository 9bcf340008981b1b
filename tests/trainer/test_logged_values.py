"""A logged value is the same number on every rank, and logging never blocks (PO-07)."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, texts
from tests.oracle import Recorder, ReplicaBatches, quiet_trainer, serial
from tests.spmd import run_spmd

BATCHES = [texts(4, seed=i, padded=True) for i in range(4)]


class TalkativeGPT(GPT):
    """Logs where logits exist, before they do, and at the end of the epoch."""

    def training_step(self, batch, batch_idx):
        self.log("num_rows", float(len(batch["ids"])), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        loss = super().training_step(batch, batch_idx)
        self.log("only_last", 2 * loss.detach(), sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.log("at_the_end", 7.0, sync_dist=True)


def fit_and_log(folder):
    """What callbacks saw after each step, and at the end."""
    seed_everything()
    recorder = Recorder()
    trainer = quiet_trainer(
        PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1),
        precision="64-true",
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    trainer.fit(TalkativeGPT(), datamodule=ReplicaBatches(BATCHES))
    return recorder.part.logged, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_every_rank_and_the_csv_file_have_the_values_of_one_process(tmp_path):
    results = run_spmd(fit_and_log, world_size=4, folder=str(tmp_path))
    losses = serial(GPT, BATCHES).losses
    for steps, at_end in results:
        assert [step["train_loss_step"] for step in steps] == pytest.approx(losses, abs=1e-10)
        assert [step["only_last"] for step in steps] == pytest.approx([2 * loss for loss in losses], abs=1e-10)
        assert at_end["train_loss_epoch"] == pytest.approx(sum(losses) / 4, abs=1e-6)  # summed in float32
        assert (at_end["num_rows"], at_end["at_the_end"]) == (16, 7)
    with Path(tmp_path, "metrics.csv").open() as file:
        rows = [float(row["train_loss_step"]) for row in csv.DictReader(file) if row["train_loss_step"]]
    assert rows == pytest.approx(losses, abs=1e-6)  # Lightning writes float32
