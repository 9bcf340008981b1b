"""What only some ranks log is known to all, or the run ends with its name; it never hangs (PO-07)."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import MeanMetric, SumMetric

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, ValidatedGPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN


class Data(ReplicaBatches):
    """The same batches for training and validation."""

    def val_dataloader(self):
        return self.train_dataloader()


class PartialNet(ValidatedGPT):
    """Logs by replica, by stage and by rank."""

    def __init__(self, **arguments):
        super().__init__(num_layers=2, **arguments)
        self.first, self.second, self.total = MeanMetric(), MeanMetric(), SumMetric()

    @property
    def at(self):
        return self.trainer.strategy.groups.at

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.at.data == 0:
            self.log("replica 0 synced", 1.0, sync_dist=True)
            self.log("replica 0 own", 2.0)
        for metric in [self.first, self.second] if self.at.data == 0 else [self.second, self.first]:
            metric(float(self.at.data))  # in another order on each replica
            self.log("first" if metric is self.first else "second", metric, on_step=False, on_epoch=True)
        if self.at.data == 0:
            self.total(5.0)
            self.log("metric of replica 0", self.total, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log(f"stage {self.at.pipeline}", 3.0)
        if self.global_rank == 0:
            self.log("rank 0 each step", 4.0, sync_dist=True)

    def on_train_epoch_end(self):
        if self.global_rank == 0:
            self.log("rank 0 synced", 5.0, sync_dist=True)
            self.log("rank 0 own", 6.0)
        if self.at.pipeline == 0 and self.at.data == 0:
            self.log("first stage synced", 7.0, sync_dist=True)

    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            self.log("validation of rank 0", 8.0, sync_dist=True)


class Reader(Callback):
    """Reads metrics on one rank alone, which computes them there."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            assert "first" in trainer.callback_metrics
            self.log("callback of rank 0", 9.0, sync_dist=True)


def known(strategy):
    """What a rank knows at the end, by name."""
    trainer = quiet_trainer(
        PTDPStrategy(micro_batch_size=1, **strategy), callbacks=[Reader()], use_distributed_sampler=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``compute`` method of metric SumMetric")  # on the replica without values
        warnings.filterwarnings("ignore", "It is recommended to use")  # for what is logged without sync_dist
        trainer.fit(PartialNet(), datamodule=Data([texts(4), texts(4, seed=1)]))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "strategy",
    [
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "data_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_plan": PLAN},
    ],
    ids=["d2", "p2", "p2d2", "t2p2"],
)
def test_what_some_ranks_log_is_known_to_all(strategy):
    d, p = strategy.get("data_parallel_size", 1), strategy.get("pipeline_parallel_size", 1)
    ranks = run_spmd(known, world_size=d * p * strategy.get("tensor_parallel_size", 1), strategy=strategy, timeout=60.0)
    for rank, metrics in enumerate(ranks):
        expected = {
            "replica 0 synced": 1.0,
            "first": (d - 1) / 2,
            "second": (d - 1) / 2,
            "metric of replica 0_epoch": 5.0 * 2 * (4 // d),
            **{f"stage {stage}": 3.0 for stage in range(p)},
            "rank 0 each step": 4.0,
            "rank 0 synced": 5.0,
            "first stage synced": 7.0,
            "validation of rank 0": 8.0,
            "callback of rank 0": 9.0,
        }
        assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)
        is_replica_0 = rank // strategy.get("tensor_parallel_size", 1) % d == 0
        assert {name: metrics.get(name) for name in ("replica 0 own", "rank 0 own")} == (
            {"replica 0 own": 2.0, "rank 0 own": 6.0} if is_replica_0 else {"replica 0 own": None, "rank 0 own": None}
        )


class StepsByHand(pl.LightningModule):
    """Manual optimization, which logs on one replica."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.linear = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.linear(batch["ids"].float()).mean())
        optimizer.step()
        if self.trainer.strategy.groups.at.data == 1:
            self.log("by hand", float(batch_idx), sync_dist=True, on_step=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_hand():
    trainer = quiet_trainer(PTDPStrategy(data_parallel_size=2), use_distributed_sampler=False)
    trainer.fit(StepsByHand(), datamodule=ReplicaBatches([texts(4)] * 3))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_manual_steps_agree_too():
    assert run_spmd(by_hand) == [{"by hand": 1.0, "by hand_step": 2.0, "by hand_epoch": 1.0}] * 2


# -- what cannot be logged ---------------------------------------------------------------------------------------------

BAD = {
    "a text": "lr is 3",
    "nothing": None,
    "two numbers": torch.ones(2),
    "a dict": {"a": {"b": 1.0}},
}


class BadNet(GPT):
    """Logs what cannot be logged, on the last stage of one replica."""

    def __init__(self, what):
        super().__init__(num_layers=2)
        self.what, self.stray = what, [MeanMetric()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        groups = getattr(self.trainer.strategy, "groups", None)
        if groups is None or groups.at.data == 0:
            if self.what == "a stray metric":
                self.log("x", self.stray[0])
            elif self.what == "a median":
                self.log("x", loss, reduce_fx="median")
            elif self.what == "at no time":
                self.log("x", loss, on_step=False, on_epoch=False)
            elif self.what == "with an unknown argument":
                self.log("x", loss, every=2)
            else:
                self.log("x", BAD[self.what])
        return loss


def refusal_of(trainer, what):
    with pytest.raises((ValueError, TypeError, MisconfigurationException)) as caught:
        trainer.fit(BadNet(what), datamodule=ReplicaBatches([texts(4)]))
    return type(caught.value), str(caught.value), "\n".join(getattr(caught.value, "__notes__", []))


def parallel_refusals():
    strategy = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    found = {}
    for what in [*BAD, "a stray metric", "a median", "at no time", "with an unknown argument"]:
        trainer = quiet_trainer(PTDPStrategy(**strategy), use_distributed_sampler=False)
        found[what] = refusal_of(trainer, what)
    return found


def test_errors_are_lightnings_on_every_rank():
    ranks = run_spmd(parallel_refusals, world_size=4, timeout=60.0)
    for what in ranks[0]:
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        plain = pl.Trainer(accelerator="cpu", devices=1, logger=False, max_epochs=1, **quiet)
        kind, message, _ = refusal_of(plain, what)
        for found in ranks:
            assert found[what][:2] == (kind, message)
            assert "test_partial_logs.py" in found[what][2]
            assert "in training_step" in found[what][2]
