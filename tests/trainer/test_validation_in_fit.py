"""Validation between training steps: PO-06, and when and how often Lightning asks for it."""

import warnings
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

from tests.hygiene import seed_everything
from tests.models import Rows
from tests.trainer.evaluated import (
    EMPTY_LOADER,
    Loaders,
    Surveyed,
    in_one_process,
    numbered,
    on_every_rank,
    trainer,
)

# A module that overrides the first two is not put back by Lightning. The last comes after on_fit_start, as with all
# strategies that load a checkpoint into parts of a module.
NOT_RECORDED = {"on_validation_model_train", "on_test_model_train", "on_load_checkpoint"}

PO_06: dict[str, Any] = {
    "data": {"sizes": [5], "batch_size": 2},
    "num_sanity_val_steps": 2,
    "val_check_interval": 1,
    "max_steps": 3,
}

WHEN: dict[str, dict[str, Any]] = {
    "within an epoch": {"val_check_interval": 0.5},
    "across epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "a whole sanity check": {"num_sanity_val_steps": -1},
    "overfit_batches": {"overfit_batches": 2},
    "overfit_batches as a part": {"overfit_batches": 0.5},
    "fast_dev_run": {"fast_dev_run": 2},
    "loaders made anew": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "an empty loader": {"data": {"sizes": [0], "batch_size": 2}},
}


class FitLoaders(Loaders):
    """Trains on 12 rows in their order, in 3 batches."""

    def train_dataloader(self):
        rows = Rows(numbered(12, first=100))
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        order = None if self.trainer.overfit_batches else DistributedSampler(rows, shuffle=False, **share)
        return DataLoader(rows, batch_size=4 // share["num_replicas"], sampler=order)


def recording(base, who):
    """A subclass that takes down every hook that is called, and the rows that it is shown."""

    def record(name):
        def hook(self, *args, **kwargs):
            rows = [row for arg in args if isinstance(arg, dict) and "row" in arg for row in arg["row"].tolist()]
            self.events.append((who, name, rows))
            return getattr(super(Recording, self), name)(*args, **kwargs)

        return hook

    hooks = [name for name in dir(base) if name.startswith("on_") and name not in NOT_RECORDED]
    Recording = type(f"Recording{base.__name__}", (base,), {name: record(name) for name in hooks if name != "on_gpu"})
    return Recording


class Watch(Callback):
    """Takes down what each validation gave, the loss of each training batch, and which modules train then."""

    def __init__(self, folder, save_at):
        self.folder, self.save_at = folder, save_at
        self.validations, self.losses, self.modes = [], [], []

    def on_train_start(self, trainer, pl_module):
        pl_module.blocks[0].dropout.eval()
        pl_module.head.eval()

    def on_validation_end(self, trainer, pl_module):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "train" not in name}
        self.validations.append((trainer.global_step, trainer.sanity_checking, metrics))
        assert not any(module.training for module in pl_module.modules())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.modes.append({name: module.training for name, module in pl_module.named_modules()})
        self.save(trainer, "batch")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch")

    def save(self, trainer, where):
        if (trainer.global_step, where) == self.save_at:
            trainer.save_checkpoint(f"{self.folder}/saved.ckpt")


def fitted(layout, data, records=False, strategy=None, folder=None, save_at=None, resumes=False, **arguments):
    """What the run saw; with `records` its hooks too, and those of a `validate` after it."""
    seed_everything()
    for message in ("You have overridden `on_", "You're resuming from a checkpoint that ended before", EMPTY_LOADER):
        warnings.filterwarnings("ignore", message)
    watch, recorder = Watch(folder, save_at), recording(Callback, "callback")()
    module = (
        recording(Surveyed, "module")() if records else Surveyed()
    ).double()  # a plain run loads before it converts
    recorder.events = events = []
    if records:
        module.events = events
    run = trainer(layout, strategy=strategy, callbacks=[watch, recorder], **arguments)
    loaders = FitLoaders(**data)
    run.fit(module, datamodule=loaders, ckpt_path=f"{folder}/saved.ckpt" if resumes else None)
    after = run.validate(module, datamodule=loaders, verbose=False) if records else []
    return {
        "validations": [*watch.validations, *((None, None, metrics) for metrics in after)],
        "losses": watch.losses,
        "modes": watch.modes,
        "events": events,
    }


def assert_same_run(found, expected):
    """The same hooks in the same order, modes, losses and validations."""
    assert [event[:2] for event in found["events"]] == [event[:2] for event in expected["events"]]
    assert found["modes"] == expected["modes"]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-10)
    for one, other in zip(found["validations"], expected["validations"], strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], rel=1e-6)  # Lightning adds up in float32


@pytest.mark.parametrize("limit", [1.0, 0.5])
@pytest.mark.parametrize("layout", ["p2", "t2", "p2d2"])
def test_validation_between_steps_is_that_of_one_process(layout, limit):
    expected = in_one_process(fitted, records=True, limit_val_batches=limit, **PO_06)
    strategy = {"micro_batch_size": 1 if layout == "p2d2" else 2}
    results = on_every_rank(fitted, layout, records=True, limit_val_batches=limit, strategy=strategy, **PO_06)
    for found in results:
        assert_same_run(found, expected)
    if layout != "p2d2":
        assert all(found["events"] == expected["events"] for found in results)


@pytest.mark.parametrize("save_at", [(2, "batch"), (3, "epoch")], ids=["middle", "end"])
def test_validation_after_a_resume(save_at, tmp_path):
    arguments = PO_06 | {"max_steps": -1, "max_epochs": 2}
    (tmp_path / "plain").mkdir()
    saves = {"save_at": save_at, "folder": str(tmp_path / "plain")}
    in_one_process(fitted, **saves, **arguments)
    expected = in_one_process(fitted, resumes=True, **saves, **arguments)
    if save_at[1] == "batch":  # Lightning itself reads the loader from its beginning again, we go on in it
        whole = in_one_process(fitted, **arguments)
        for numbers in ("losses", "validations"):
            expected[numbers] = whole[numbers][-len(expected[numbers]) :]
    on_every_rank(fitted, "p2d2", **saves | {"folder": str(tmp_path)}, **arguments)
    for found in on_every_rank(fitted, "p2d2", resumes=True, **saves | {"folder": str(tmp_path)}, **arguments):
        assert_same_run(found, expected)


@pytest.mark.parametrize("case", WHEN)
def test_it_happens_when_it_does_in_one_process(case):
    arguments = {"data": {"sizes": [5, 3], "batch_size": 2}} | WHEN[case]
    expected = in_one_process(fitted, **arguments)
    for found in on_every_rank(fitted, "p2d2", **arguments):
        assert_same_run(found, expected)
