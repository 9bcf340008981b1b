"""Hooks of module, data module and callbacks run in the order and number of one process."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from tests.fits import LAYOUTS, Net, batches_of
from tests.hygiene import seed_everything
from tests.kept import Kept
from tests.oracle import quiet_trainer, rows_of
from tests.spmd import run_spmd

LOADERS = {"train_dataloader", "val_dataloader"}
TRANSFERS = {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
OPTIMIZATION = {"configure_optimizers", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"}
UNUSED = {"configure_sharded_model", "test_dataloader", "predict_dataloader", "from_datasets", "load_from_checkpoint"}


class Validated(Net):
    """Logs both losses, and has a schedule."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Data(pl.LightningDataModule):
    """Four batches, the last of them partial, for training and validation."""

    def train_dataloader(self):
        where = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        mine = [rows_of(batch, where["rank"], where["num_replicas"]) for batch in batches_of(4, 4, 4, 2)]
        return DataLoader(mine, batch_size=None)

    val_dataloader = train_dataloader


def hooks_of(*classes):
    """Names of the public methods that these classes define."""
    found = {name for each in classes for name, value in vars(each).items() if callable(value)}
    return {name for name in found if not name.startswith("_")} - UNUSED


def noting(base, owner, hooks):
    """A subclass that appends each hook to `self.calls.value` when it is called."""

    def note(hook):
        def method(self, *args, **kwargs):
            self.calls.value.append(f"{owner}.{hook}")
            return getattr(super(noted, self), hook)(*args, **kwargs)

        return method

    noted = type(f"Noting{base.__name__}", (base,), {hook: note(hook) for hook in hooks})
    return noted


MODULE_HOOKS = hooks_of(ModelHooks, CheckpointHooks, DataHooks) - LOADERS - TRANSFERS
NotingModule = noting(
    Validated, "module", MODULE_HOOKS | OPTIMIZATION | {"configure_gradient_clipping", "configure_callbacks"}
)
NotingData = noting(Data, "data", hooks_of(DataHooks, pl.LightningDataModule))
NotingCallback = noting(Callback, "callback", hooks_of(Callback))


def calls_of(folder, strategy):
    """Every call in two epochs with accumulation, validation, checkpoints and fresh loaders, and then in `validate`."""
    seed_everything()
    module, data, callback = NotingModule(), NotingData(), NotingCallback()
    calls = module.calls = data.calls = callback.calls = Kept([])
    trainer = quiet_trainer(
        "auto" if strategy is None else PTDPStrategy(**strategy),
        callbacks=[callback, ModelCheckpoint(folder, monitor="val_loss", save_last=True)],
        enable_checkpointing=True,
        max_epochs=2,
        accumulate_grad_batches=3,
        gradient_clip_val=0.1,
        val_check_interval=2,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data, verbose=False)
    return calls.value


@pytest.mark.parametrize("layout", ["t2", "p2v2", "p2d2"])
def test_calls_are_those_of_one_process(layout, tmp_path):
    one = calls_of(str(tmp_path / "one"), None)
    assert one.count("module.optimizer_step") == 4
    assert one.count("callback.on_after_backward") == 8
    num_ranks = 4 if layout == "p2d2" else 2
    ranks = run_spmd(calls_of, num_ranks, 60, folder=str(tmp_path / "many"), strategy=LAYOUTS[layout])
    assert ranks[0] == one
    for calls in ranks[1:]:  # data is prepared once a node
        assert calls == [call for call in one if not call.endswith(".prepare_data")]
