"""The image classifier trains unchanged with only the strategy added: metrics, decisions and files of one process."""

import csv
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_ptdp.recipes.image_classifier import ImageClassifier, Shapes, ShapesDataModule
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptdp.checkpoint.reading import read_checkpoint
from tests.hygiene import seed_everything
from tests.oracle import quiet_trainer
from tests.spmd import run_spmd

GLOBAL_BATCH = 32


class InOrder(ShapesDataModule):
    """Trains in the data's own order, so that all numbers of replicas draw the same batches."""

    def train_dataloader(self):
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        order = DistributedSampler(self.splits["train"], shuffle=False, **share)
        return DataLoader(self.splits["train"], batch_size=self.batch_size, sampler=order)


def project(folder, strategy, devices):
    """A user's script: everything of Lightning, and one word of ours."""
    seed_everything()
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log")  # of the world around a lone device
    best = ModelCheckpoint(folder, filename="{epoch}-{val_accuracy:.3f}", monitor="val_accuracy", mode="max")
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.5)
    trainer = quiet_trainer(
        strategy,
        precision="64-true",
        max_epochs=4,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[best, stopping, LearningRateMonitor()],
        enable_checkpointing=True,
    )
    model = ImageClassifier(channels=4)
    data = InOrder(num_train=128, num_val=51, num_test=51, batch_size=GLOBAL_BATCH // devices)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    return {
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "best": Path(best.best_model_path).name,
        "score": best.best_model_score.item(),
        "stopped": (stopping.stopped_epoch, trainer.current_epoch, trainer.global_step),
        "predicted": sum(len(batch) for batch in trainer.predict(model, datamodule=data)),
    }


@pytest.mark.parametrize("devices", [1, 2])
def test_one_word_more_changes_no_number(devices, tmp_path):
    folders = [str(tmp_path / name) for name in ("plain", "ptdp")]
    (one,) = run_spmd(project, world_size=1, folder=folders[0], strategy="auto", devices=1, timeout=60.0)
    ranks = run_spmd(project, world_size=devices, folder=folders[1], strategy="ptdp", devices=devices, timeout=60.0)
    assert ranks[0]["predicted"] == one["predicted"] == 51
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(one["metrics"], abs=1e-9)
        assert (rank["best"], rank["stopped"]) == (one["best"], one["stopped"])
        assert rank["score"] == pytest.approx(one["score"], abs=1e-9)
    plain, mine = (rows(folder) for folder in folders)
    assert len(mine) == len(plain)
    for row, expected in zip(mine, plain, strict=True):
        assert row == pytest.approx(expected, abs=1e-9)
    assert [path.name for path in Path(folders[1]).glob("*.ckpt")] == [one["best"]]
    saved = read_checkpoint(Path(folders[1]) / one["best"])
    ImageClassifier(**saved["hyper_parameters"]).load_state_dict(saved["state_dict"], strict=True)


def rows(folder):
    """What the logger wrote, as numbers."""
    with Path(folder, "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders
def test_it_learns():
    with torch.random.fork_rng():
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, devices=1,
        )  # fmt: skip
        trainer.fit(ImageClassifier(channels=8), datamodule=ShapesDataModule(num_train=1024, num_val=256))
    assert trainer.callback_metrics["val_accuracy"] > 0.8


def test_a_picture_follows_from_its_number():
    first, again, other = Shapes(8, seed=1), Shapes(4, seed=1), Shapes(8, seed=2)
    assert torch.equal(first[3][0], again[3][0])
    assert not torch.equal(first[3][0], other[3][0])
    assert [int(first[i][1]) for i in range(6)] == [0, 1, 2, 3, 0, 1]
