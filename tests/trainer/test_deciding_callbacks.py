"""Callbacks that stop and save decide alike on all ranks (PO-08)."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

SERIES = (3.0, 2.0, 2.5, 2.6, 1.0)


class ForcedGPT(GPT):
    """Its validation loss is the next number of SERIES. where: it is logged."""

    def __init__(self, where):
        super().__init__(num_layers=2)
        self.where = where

    def validation_step(self, batch, batch_idx):
        value = SERIES[self.current_epoch]
        if self.where == "before the model":
            self.log("val_loss", value, sync_dist=True)
        self.loss(batch)
        if self.where == "after the model":
            self.log("val_loss", value, sync_dist=True)

    def on_validation_epoch_end(self):
        if self.where == "at the end of the epoch":
            self.log("val_loss", SERIES[self.current_epoch], sync_dist=True)


class ForcedBatches(ReplicaBatches):
    """The same batches for training and validation."""

    def val_dataloader(self):
        return self.train_dataloader()


def fit_until_stopped(folder, where, t=1):
    """The epoch that was the last, what was best, and where it is."""
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="{epoch}-{val_loss:.3f}")
    trainer = quiet_trainer(
        PTDPStrategy(tensor_parallel_size=t, pipeline_parallel_size=2, tensor_parallel_plan=PLAN if t > 1 else None),
        enable_checkpointing=True,
        callbacks=[best, EarlyStopping("val_loss", patience=2)],
        max_epochs=5,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(ForcedGPT(where), datamodule=ForcedBatches([texts(4)]))
    return trainer.current_epoch, float(best.best_model_score), best.best_model_path


@pytest.mark.parametrize(
    ("where", "t", "world_size"),
    [
        ("before the model", 2, 4),
        ("after the model", 2, 4),  # on the last stage only
        ("at the end of the epoch", 2, 4),
        ("after the model", 1, 2),
        ("after the model", 1, 4),
    ],
)
def test_all_ranks_stop_in_the_same_epoch_and_keep_the_same_checkpoint(where, t, world_size, tmp_path):
    results = run_spmd(fit_until_stopped, world_size=world_size, timeout=60, folder=str(tmp_path), where=where, t=t)
    assert results == [(4, 2.0, str(tmp_path / "epoch=1-val_loss=2.000.ckpt"))] * world_size
    assert list(Path(tmp_path).iterdir()) == [tmp_path / "epoch=1-val_loss=2.000.ckpt"]
