"""Whatever is logged, wherever, is what one process logs, under every layout (PO-07).

Weights stand still, so that a replica's own value is that of a plain run on the replica's rows.
"""

import csv
from functools import cache, partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer, rows_of
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

CLASSES = 8
TRAIN = [texts(rows, length=4, vocabulary=CLASSES, seed=i) for i, rows in enumerate((8, 6))]
VALIDATION = [
    [texts(rows, length=4, vocabulary=CLASSES, seed=seed + i) for i, rows in enumerate((8, 6))] for seed in (10, 20)
]
REDUCTIONS = ("mean", "sum", "min", "max")
LEVELS = {"s": (True, False), "e": (False, True), "se": (True, True)}
LOOPS = ("train", "validation", "test")
POINTS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end")


def say(log, name, rows, *, reductions=REDUCTIONS, levels=("e",)):
    """Log a statistic of rows under every combination; what is not synced says "own" in its name."""
    for reduction in reductions:
        value = getattr(rows, reduction)()
        for level in levels:
            for is_synced in (True, False):
                on_step, on_epoch = LEVELS[level]
                log(
                    f"{name} {reduction} {level} {'synced' if is_synced else 'own'}",
                    value,
                    on_step=on_step,
                    on_epoch=on_epoch,
                    reduce_fx=reduction,
                    sync_dist=is_synced,
                    prog_bar=reduction == "max",
                )


def hook(loop, point, *, by):
    """A hook that logs: in batches by several reductions, around them a number (which replicas have no sum of)."""

    def run(self, *args):
        name = f"{by} {loop} {point}"
        if point.startswith("batch"):
            batch = next(arg for arg in args if isinstance(arg, dict) and "ids" in arg)
            rows, reductions = batch["ids"].double().mean(1), ("mean", "sum", "max") if by == "module" else ("mean",)
            say(self.log, name, rows, reductions=reductions, levels=("se",) if loop == "train" else ("e",))
        else:
            say(self.log, name, torch.tensor([3.0, 3.0]), reductions=("mean",))

    return run


def hooks(*, by):
    """Every hook of LOOPS and POINTS, as methods."""
    return {f"on_{loop}_{point}": hook(loop, point, by=by) for loop in LOOPS for point in POINTS}


TalkativeCallback = type("TalkativeCallback", (Callback,), hooks(by="callback"))


def collection(prefix):
    """Metrics in groups, nested, with names made of prefixes."""
    macro = [MulticlassPrecision(CLASSES, average="macro"), MulticlassF1Score(CLASSES, average="macro")]
    return MetricCollection(
        [MetricCollection(macro, postfix="_macro"), MetricCollection([MulticlassAccuracy(CLASSES)], postfix="_plain")],
        prefix=prefix,
    )


class TalkativeNet(GPT):
    """Logs everywhere. Metrics that are logged of a step say "own": Lightning does not sync those."""

    def __init__(self):
        super().__init__(num_layers=4, hidden=16, vocabulary=CLASSES, max_length=4, lr=0.0)
        self.of_steps, self.of_epochs = collection("own step/"), collection("epoch/")
        self.inverse = 1 - MulticlassPrecision(CLASSES, average="macro")
        self.correlation = PearsonCorrCoef()
        self.mean, self.most = MeanMetric(), MaxMetric()
        self.of_evaluation = nn.ModuleList([collection(f"loader {i}/") for i in range(2)])

    def scores(self, batch):
        """A number a row, and what metrics take."""
        logits = self(batch["ids"])
        return logits.mean((1, 2)), logits.flatten(0, 1), batch["labels"].flatten()

    def training_step(self, batch, batch_idx):
        rows, logits, labels = self.scores(batch)
        say(self.log, "step", rows.detach(), levels=LEVELS)
        self.log("a number own", 2.0)
        self.log("twice", rows[0].detach() * 0 + 1.0, on_step=True, on_epoch=True)
        self.log("twice", rows[0].detach() * 0 + 2.0, on_step=True, on_epoch=True)
        self.of_steps(logits, labels)
        self.log_dict(self.of_steps)
        self.of_epochs.update(logits, labels)
        self.log_dict(self.of_epochs, on_step=False, on_epoch=True)
        self.inverse(logits, labels)
        self.log("own inverse", self.inverse, on_step=True, on_epoch=False, prog_bar=True)
        self.correlation(logits[:, 0].detach(), labels.double())
        self.log("own correlation", self.correlation, on_step=True, on_epoch=False)
        self.mean(rows.detach())
        self.log("mean of rows", self.mean, on_step=False, on_epoch=True, batch_size=len(rows))
        return nn.functional.cross_entropy(logits, labels)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        rows, logits, labels = self.scores(batch)
        say(self.log, "evaluation", rows, levels=("e", "se"))
        self.log("a log", rows.mean(), add_dataloader_idx=True, batch_size=len(rows), sync_dist=True)
        self.log(f"of {dataloader_idx}", rows.mean(), add_dataloader_idx=False, sync_dist=True)
        self.of_evaluation[dataloader_idx].update(logits, labels)
        self.log_dict(self.of_evaluation[dataloader_idx], add_dataloader_idx=False)

    test_step = validation_step

    def on_before_optimizer_step(self, optimizer):
        self.log("before the step", 4.0, sync_dist=True)

    def on_after_backward(self):
        self.log("after backward", 5.0, sync_dist=True)


def on_train_epoch_end(self):
    """Also a metric that every rank updates in a hook."""
    hook("train", "epoch_end", by="module")(self)
    self.most(7.0)
    self.log("most", self.most, on_step=False, on_epoch=True)


for _name, _method in hooks(by="module").items():
    setattr(TalkativeNet, _name, _method)
TalkativeNet.on_train_epoch_end = on_train_epoch_end


class Listener(Callback):
    """Takes down what trainers show, when the hooks of a moment are over."""

    def __init__(self):
        self.seen = []

    def listen(self, trainer, module, *args):
        shown = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen.append([{name: float(value) for name, value in metrics.items()} for metrics in shown])

    on_train_batch_start = on_validation_end = on_train_end = on_test_end = listen


class Batches(ReplicaBatches):
    """Training and two loaders of evaluation, of which a replica takes its rows."""

    def __init__(self, part=lambda batch: batch):
        super().__init__([part(batch) for batch in TRAIN])
        self.of_evaluation = [[part(batch) for batch in batches] for batches in VALIDATION]

    def val_dataloader(self):
        where = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return [
            DataLoader([rows_of(batch, where["rank"], where["num_replicas"]) for batch in batches], batch_size=None)
            for batches in self.of_evaluation
        ]

    test_dataloader = val_dataloader


def run(trainer, folder, data, epochs):
    """Everything that was shown, and what the tests returned."""
    seed_everything()
    module, listener = TalkativeNet(), Listener()
    trainer = trainer(
        callbacks=[listener, TalkativeCallback()],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        precision="64-true",
        max_epochs=epochs,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=data)
    tested = trainer.test(module, datamodule=data, verbose=False)
    return listener.seen, tested


def plain_trainer(**arguments):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=1, **quiet, **arguments)


def parallel_run(folder, strategy, epochs):
    return run(partial(quiet_trainer, PTDPStrategy(**strategy)), folder, Batches(), epochs)


def rows_in(folder):
    """The rows of a CSV file, without empty cells."""
    with Path(folder, "metrics.csv").open() as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def chosen(whole, own):
    """What a replica should show: values of the whole batch, and its own where the name says so."""
    assert whole.keys() == own.keys()
    return {name: own[name] if "own" in name else value for name, value in whole.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Plain runs on the rows of a replica: what they show, what they return, and their files."""

    @cache
    def plain_run(replica, num_replicas, epochs):
        folder = tmp_path_factory.mktemp("plain")
        data = Batches(lambda batch: rows_of(batch, replica, num_replicas))
        return (*run(plain_trainer, folder, data, epochs), rows_in(folder))

    return plain_run


TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}
LAYOUTS = {
    "m2": {"micro_batch_size": 4, "eval_micro_batch_size": 3},
    "d2": {"micro_batch_size": 2, "data_parallel_size": 2},
    "p2": {"pipeline_parallel_size": 2, "micro_batch_size": 4},
    "p2d2": {"pipeline_parallel_size": 2, "data_parallel_size": 2, "micro_batch_size": 2, "eval_micro_batch_size": 2},
    "t2p2": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "micro_batch_size": 4,
        "tensor_parallel_plan": PLAN,
    },
    "p2v2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "micro_batch_size": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_shows_what_one_process_shows(layout, plain, tmp_path):
    strategy, epochs = LAYOUTS[layout], 2 if layout == "p2" else 1
    d = strategy.get("data_parallel_size", 1)
    world_size = d * strategy.get("tensor_parallel_size", 1) * strategy.get("pipeline_parallel_size", 1)
    arguments = {"folder": str(tmp_path), "strategy": strategy, "epochs": epochs}
    ranks = run_spmd(parallel_run, world_size=world_size, timeout=60.0, **arguments)
    shown, tested, rows = plain(0, 1, epochs)
    for rank, (seen, returned) in enumerate(ranks):
        replica = rank // strategy.get("tensor_parallel_size", 1) % d
        own_shown, own_tested, own_rows = plain(replica, d, epochs)
        assert len(seen) == len(shown)
        for moment, (mine, theirs, own) in enumerate(zip(seen, shown, own_shown, strict=True)):
            for kind in range(3):
                expected = chosen(theirs[kind], own[kind])
                assert mine[kind] == pytest.approx(expected, abs=1e-6), (rank, moment, kind)
        for mine, theirs, own in zip(returned, tested, own_tested, strict=True):
            assert mine == pytest.approx(chosen(theirs, own), abs=1e-6)
    written, own_rows = rows_in(tmp_path), plain(0, d, epochs)[2]
    assert len(written) == len(rows)
    for mine, theirs, own in zip(written, rows, own_rows, strict=True):
        assert mine == pytest.approx(chosen(theirs, own), abs=1e-6)
