"""Replicas whose data ends at different moments stop together (PO-11)."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import Stream, ValidatedGPT, texts
from tests.oracle import quiet_trainer
from tests.spmd import run_spmd

TRAIN_ROWS, VAL_ROWS = (5, 4), (3, 1)


class UnevenStreams(pl.LightningDataModule):
    """Each replica has its own rows, one a batch."""

    def rows(self, counts, seed):
        replica = self.trainer.distributed_sampler_kwargs["rank"]
        return DataLoader(Stream(texts(counts[replica], seed=seed + replica)), batch_size=1)

    def train_dataloader(self):
        return self.rows(TRAIN_ROWS, seed=0)

    def val_dataloader(self):
        return self.rows(VAL_ROWS, seed=2)


def fit_uneven_streams(with_validation):
    """Steps made, the validation loss, and what was warned of."""
    seed_everything()
    limit = {} if with_validation else {"limit_val_batches": 0}
    trainer = quiet_trainer(PTDPStrategy(pipeline_parallel_size=2), num_sanity_val_steps=0, **limit)
    module = ValidatedGPT(lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=UnevenStreams())
    return trainer.global_step, trainer.callback_metrics.get("val_loss"), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("with_validation", [False, True])
def test_training_ends_with_the_first_replica_that_has_no_more(with_validation):
    results = run_spmd(fit_uneven_streams, world_size=4, with_validation=with_validation)
    assert [steps for steps, _, _ in results] == [4, 4, 4, 4]
    told = [text for text in results[0][2] if "training data ended" in text]
    assert len(told) == 1
    assert "ended on replica 1 after 4 batches" in told[0]


def test_validation_counts_every_batch_once():
    results = run_spmd(fit_uneven_streams, world_size=4, with_validation=True)
    seed_everything()
    module = ValidatedGPT()
    with torch.no_grad():
        losses = [
            float(module.loss({name: column[i : i + 1] for name, column in texts(count, seed=2 + replica).items()}))
            for replica, count in enumerate(VAL_ROWS)
            for i in range(count)
        ]
    expected = sum(losses) / 4
    for _, val_loss, _ in results:
        assert float(val_loss) == pytest.approx(expected, abs=1e-6)  # float32
