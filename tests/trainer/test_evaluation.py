"""Validation counts each sample once, however many replicas share them."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, Rows, ValidatedGPT, texts
from tests.oracle import quiet_trainer
from tests.spmd import run_spmd

NUM_ROWS = 5


class MeasuredGPT(ValidatedGPT):
    """Also measures the mean id of its rows."""

    def __init__(self):
        super().__init__()
        self.mean_id = MeanMetric()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.mean_id.update(batch["ids"].double().mean(1))
        self.log("mean_id", self.mean_id)


class ValRows(pl.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def val_dataloader(self):
        return DataLoader(Rows(texts(NUM_ROWS)), self.batch_size)


def validated(p, batch_size):
    """The metrics that `validate` returns."""
    seed_everything()
    trainer = quiet_trainer(PTDPStrategy(pipeline_parallel_size=p), precision="64-true")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `DistributedSampler` with the dataloaders")  # it says samples repeat
        (metrics,) = trainer.validate(MeasuredGPT(), datamodule=ValRows(batch_size), verbose=False)
    return metrics


@pytest.mark.parametrize(("p", "d", "batch_size"), [(1, 2, 1), (2, 2, 1), (1, 4, 2), (2, 1, 2)])
def test_metrics_are_those_of_every_sample_once(p, d, batch_size):
    seed_everything()
    rows, module = texts(NUM_ROWS), GPT().double()
    with torch.no_grad():
        expected = {"val_loss": module.loss(rows).item(), "mean_id": rows["ids"].double().mean().item()}
    for metrics in run_spmd(validated, world_size=p * d, p=p, batch_size=batch_size):
        assert metrics == pytest.approx(expected, abs=1e-5)  # Lightning and the metric add up in float32
