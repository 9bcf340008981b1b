"""A run that is stopped in the middle of an epoch and resumed is the run that was not (PO-10)."""

import math
import warnings
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from tests.hygiene import seed_everything
from tests.models import ValidatedGPT, texts
from tests.oracle import quiet_trainer
from tests.spmd import run_spmd
from tests.trainer.test_checkpoints import LAYOUTS as CHECKPOINT_LAYOUTS
from tests.trainer.test_checkpoints import strategy, world

LAYOUTS = {**CHECKPOINT_LAYOUTS, "d2": (1, 1, 1, 2), "p2d2": (1, 2, 1, 2)}
NUM_SAMPLES, GLOBAL_BATCH = 32, 4  # 8 steps an epoch
SAVED_AT, END = 3, 10


class Texts(Dataset):
    """Texts that know their number, one token of which is drawn when they are read."""

    def __init__(self, size: int = NUM_SAMPLES, *, draws: bool = True) -> None:
        self.rows, self.draws = texts(size, seed=5), draws

    def __len__(self) -> int:
        return len(self.rows["ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.rows["ids"][index].clone()
        if self.draws:
            ids[0] = (int(torch.randint(8, ())) + np.random.randint(8)) % 64
        return {"ids": ids, "labels": self.rows["labels"][index], "number": torch.tensor(index)}


class Stream(IterableDataset):
    """A replica's texts in an order of its own, drawn when it begins."""

    def __init__(self, replica: int, num_replicas: int) -> None:
        self.texts, self.share = Texts(), (replica, num_replicas)

    def __iter__(self):
        replica, num_replicas = self.share
        for index in torch.randperm(NUM_SAMPLES)[replica::num_replicas].tolist():
            yield self.texts[index]


class SizedStream(Stream):
    """One that promises a length."""

    def __len__(self) -> int:
        return NUM_SAMPLES // self.share[1]


class Keeping:
    """A loader that keeps its own place."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.place = loader, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        begin, self.place = self.place % len(self), self.place % len(self)
        for batch in list(self.loader)[begin:]:
            self.place += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Batches:
    """No DataLoader, but something that can be iterated over."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class OwnBatches(BatchSampler):
    """A user's own."""


class Data(pl.LightningDataModule):
    """Training loaders of many kinds, and four batches to validate on."""

    def __init__(self, kind: str, batch_size: int | None = None) -> None:
        super().__init__()
        self.kind, self.batch_size = kind, batch_size

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        where = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        d = where["num_replicas"]
        size = self.batch_size or GLOBAL_BATCH // d
        samples, stream = Texts(), (where["rank"], d)
        order = torch.Generator().manual_seed(3)
        fork: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
        weights = torch.linspace(1, 3, NUM_SAMPLES).tolist()
        make = {
            "shuffled": lambda: DataLoader(samples, size, shuffle=True),
            "fixed": lambda: DataLoader(Texts(draws=False), size, shuffle=True),
            "own generator": lambda: DataLoader(samples, size, shuffle=True, generator=order),
            "in order": lambda: DataLoader(samples, size),
            "workers": lambda: DataLoader(Texts(draws=False), size, shuffle=True, **fork),
            "persistent": lambda: DataLoader(Texts(draws=False), size, shuffle=True, persistent_workers=True, **fork),
            "weighted": lambda: DataLoader(samples, size, sampler=WeightedRandomSampler(weights, NUM_SAMPLES)),
            "own batches": lambda: DataLoader(
                samples, batch_sampler=OwnBatches(RandomSampler(samples), size, drop_last=False)
            ),
            "stream": lambda: DataLoader(Stream(*stream), size),
            "sized stream": lambda: DataLoader(SizedStream(*stream), size),
            "stream of workers": lambda: DataLoader(
                Stream(*stream), size, num_workers=1, multiprocessing_context="fork"
            ),
            "plain iterable": lambda: Batches(list(DataLoader(Texts(draws=False), size))),
            "keeping": lambda: Keeping(DataLoader(Texts(draws=False), size)),
            "two": lambda: CombinedLoader(
                [DataLoader(samples, size, shuffle=True), DataLoader(Texts(20), size, shuffle=True)], "max_size_cycle"
            ),
        }
        return make[self.kind]()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Texts(8, draws=False), 2)


class Net(ValidatedGPT):
    """With dropout and a schedule: warm-up over 4 steps, then a cosine."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, hidden=16, dropout=0.1, optimizer="adamw", lr=0.01)

    def training_step(self, batch, batch_idx):
        parts = batch if isinstance(batch, list) else [batch]
        return super().training_step({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 4, 0.5 + 0.5 * math.cos(math.pi * step / 20))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Sure(Net):
    """Without dropout, which draws by layout."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.dropout.p = 0.0


class Drifting(Sure):
    """Each replica draws another number of numbers."""

    def on_train_batch_start(self, batch, batch_idx):
        torch.rand(1 + self.trainer.strategy.groups.at.data)


class Asking(Net):
    """Asks for the number of steps, for which loaders are made before a checkpoint is loaded."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Diary(Callback):
    """Notes each batch of this rank, and saves once."""

    def __init__(self, path: str | None, saved_at: int) -> None:
        self.path, self.saved_at = path, saved_at
        self.batches: list[dict[str, Any]] = []
        self.validations: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        parts = batch if isinstance(batch, list) else [batch]
        self.batches.append(
            {
                "numbers": [number for part in parts for number in part["number"].tolist()],
                "first tokens": [token for part in parts for token in part["ids"][:, 0].tolist()],
                "loss": float(outputs["loss"]),
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "at": (trainer.current_epoch, batch_idx, trainer.global_step),
            }
        )
        if self.path is not None and len(self.batches) == self.saved_at:
            trainer.save_checkpoint(self.path)

    def on_validation_start(self, trainer, pl_module):
        self.validations.append((trainer.global_step, 0))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        step, count = self.validations[-1]
        self.validations[-1] = step, count + 1


def train(sizes, kind, *, save=None, saved_at=SAVED_AT, resume=None, batch_size=None, make=Net, **trainer) -> Any:
    seed_everything()
    if resume is not None:
        torch.manual_seed(99)  # what a process happens to have drawn before does not matter
        np.random.seed(99)
    warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")  # of streams by replica
    diary, module = Diary(save, saved_at), make()
    usual = {"max_epochs": -1, "max_steps": END, "val_check_interval": 4, "check_val_every_n_epoch": None}
    quiet_trainer(
        strategy(*sizes), callbacks=[diary], precision="64-true", num_sanity_val_steps=0, **{**usual, **trainer}
    ).fit(module, datamodule=Data(kind, batch_size), ckpt_path=resume)
    return {
        "batches": diary.batches,
        "validations": diary.validations,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
    }


def stopped_and_whole(sizes, kinds, folder, **options):
    """Each kind of loader: the whole run, and one from its checkpoint on."""
    found = {}
    for kind in kinds:
        path = f"{folder}/{kind}.ckpt"
        whole = train(sizes, kind, save=path, **options)
        found[kind] = whole, train(sizes, kind, resume=path, **options)
    return found


def assert_same_bits(whole, resumed, saved_at=SAVED_AT):
    assert resumed["batches"] == whole["batches"][saved_at:]
    assert resumed["validations"] == [seen for seen in whole["validations"] if seen[0] > saved_at]
    assert all(torch.equal(value, resumed["weights"][name]) for name, value in whole["weights"].items())


KINDS = [
    "shuffled", "own generator", "in order", "workers", "persistent", "weighted", "own batches", "stream",
    "sized stream", "stream of workers", "plain iterable", "keeping", "two",
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ("one", KINDS[:6]),
        ("one", KINDS[6:]),
        ("p2d2", ["workers", "weighted", "sized stream", "stream", "two"]),
        ("t2", ["own generator"]),
        ("p2", ["shuffled"]),
    ],
)
def test_resumed_run_has_the_bits_of_the_run_that_was_not_stopped(layout, kinds, tmp_path):
    sizes = LAYOUTS[layout]
    for runs in run_spmd(stopped_and_whole, world(sizes), 120, sizes=sizes, kinds=kinds, folder=str(tmp_path)):
        for kind, (whole, resumed) in runs.items():
            assert len(whole["batches"]) == END, kind
            assert_same_bits(whole, resumed)


def test_counters_schedule_and_validations_go_on_in_the_middle_of_an_epoch(tmp_path):
    for runs in run_spmd(
        stopped_and_whole, 4, 60, sizes=LAYOUTS["p2d2"], kinds=["shuffled"], folder=str(tmp_path), max_steps=12
    ):
        whole, resumed = runs["shuffled"]
        assert_same_bits(whole, resumed)
        assert [batch["at"] for batch in resumed["batches"]] == [
            (step // 8, step % 8, step + 1) for step in range(SAVED_AT, 12)
        ]
        assert resumed["validations"] == [(4, 2), (8, 2), (12, 2)]


@pytest.mark.parametrize(
    "options",
    [
        {"saved_at": 8, "val_check_interval": 6},
        {"saved_at": 4, "accumulate_grad_batches": 2, "val_check_interval": 6},
        {"limit_train_batches": 5, "val_check_interval": 5},
        {"make": Asking, "max_epochs": 2, "max_steps": -1},
    ],
    ids=["epoch's end", "accumulation", "limited epochs", "length asked for early"],
)
def test_other_moments_and_loops(options, tmp_path):
    saved_at = options.get("saved_at", SAVED_AT)
    ((whole, resumed),) = (
        runs["shuffled"]
        for runs in run_spmd(
            stopped_and_whole, 1, 60, sizes=LAYOUTS["one"], kinds=["shuffled"], folder=str(tmp_path), **options
        )
    )
    assert resumed["batches"] == whole["batches"][saved_at:]
    assert all(torch.equal(value, resumed["weights"][name]) for name, value in whole["weights"].items())


# -- another layout ----------------------------------------------------------------------------------------------------


def seen_by_all(ranks):
    """The numbers of each step's samples, of all replicas together."""
    return [
        sorted(number for numbers in {tuple(rank[i]["numbers"]) for rank in ranks} for number in numbers)
        for i in range(len(ranks[0]))
    ]


def leg(layout, kind="fixed", **options):
    """What every rank noted in a run under a layout."""
    sizes = LAYOUTS[layout]
    usual = {"make": Sure, "max_steps": 8}
    found = run_spmd(train, world(sizes), 60, sizes=sizes, kind=kind, **{**usual, **options})
    return [rank["batches"] for rank in found]


@pytest.mark.parametrize(("first", "then"), [("one", "d2"), ("d2", "one"), ("p2d2", "one"), ("t2", "p2d2")])
def test_another_layout_sees_what_was_not_seen_and_computes_the_same(first, then, tmp_path):
    path = str(tmp_path / "saved.ckpt")
    whole = leg(first, save=path)
    resumed = leg(then, resume=path)
    assert seen_by_all(resumed) == seen_by_all(whole)[SAVED_AT:]
    for mine, expected in zip(resumed[0], whole[0][SAVED_AT:], strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], abs=1e-10)
        assert (mine["lr"], mine["at"]) == (expected["lr"], expected["at"])


def test_the_rest_of_an_epoch_is_dealt_out_again_and_again(tmp_path):
    paths = [str(tmp_path / f"{name}.ckpt") for name in ("first", "second", "third")]
    legs = [leg("d2", save=paths[0], batch_size=2, max_steps=3)]  # 4 samples a step
    legs += [leg("d2", resume=paths[0], save=paths[1], saved_at=1, batch_size=2, max_steps=4)]
    legs += [leg("one", resume=paths[1], save=paths[2], saved_at=2, batch_size=5, max_steps=6)]
    legs += [leg("d2", resume=paths[2], batch_size=2, max_steps=-1, max_epochs=2, val_check_interval=2)]
    epochs = [batch["at"][0] for batch in legs[-1][0]]
    steps = [step for ranks in legs for step in seen_by_all(ranks)]
    assert sorted(number for step in steps[:8] for number in step) == list(range(NUM_SAMPLES))
    assert epochs == [0] * 2 + [1] * 8, "six samples in batches of four, then a whole epoch"


def what_is_said(path):
    with patch("lightning_ptdp.callbacks.resuming.rank_zero_info") as said:
        train(LAYOUTS["one"], "shuffled", resume=path, max_steps=5)
    return [call.args[0] for call in said.call_args_list]


def test_generators_that_drew_apart_go_on_in_the_same_layout_and_start_afresh_in_another(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    whole = leg("d2", "shuffled", make=Drifting, save=path)
    assert len(torch.load(f"{path}/meta.pt", weights_only=True)["lightning_ptdp"]["states"]) == 2
    assert leg("d2", "shuffled", make=Drifting, resume=path) == [rank[SAVED_AT:] for rank in whole]
    ((message,),) = run_spmd(what_is_said, 1, 60, path=path)
    assert "the generators of torch, NumPy and Python start afresh under {'tensor_parallel_size': 1" in message


def resumed_with_warnings(sizes, kind, resume):
    with pytest.warns(UserWarning, match="what is left of its epoch cannot be dealt out anew"):
        train(sizes, kind, resume=resume, max_steps=5)


def test_order_that_cannot_be_dealt_out_is_told(tmp_path):
    path = str(tmp_path / "saved.ckpt")
    leg("d2", "weighted", save=path, max_steps=4)
    run_spmd(resumed_with_warnings, 1, 60, sizes=LAYOUTS["one"], kind="weighted", resume=path)
