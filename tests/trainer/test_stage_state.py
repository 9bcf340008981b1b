"""Python state that steps leave on the module is there in the hooks at the end of an epoch, on every stage."""

import threading
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd

BATCHES = [texts(4), texts(4, seed=1)]


class Data(ReplicaBatches):
    """The same batches in every loop."""

    def val_dataloader(self):
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


class Meter:
    """An accumulator as users write them."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1


class CollectingGPT(GPT):
    """Collects in its steps, behind the model, and uses it at the end of the epoch."""

    def __init__(self):
        super().__init__(num_layers=4, hidden=8, lr=0.0)
        self.losses, self.by_kind, self.seen, self.meter = [], defaultdict(list), set(), Meter()
        self.sum, self.last_name = torch.zeros(()), "none"
        self.alias = self.losses
        self.train_losses, self.at_ends = [], {}

    def collect(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.by_kind["rows"].append(len(batch["ids"]))
        self.seen.add(batch_idx)
        self.meter.update(loss.item())
        self.sum += loss.detach()
        self.last_name = f"batch {batch_idx}"
        self.best = max(getattr(self, "best", 0), batch_idx)
        return loss

    validation_step = test_step = predict_step = collect

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.train_losses.append(loss.detach())
        self.last_name = "trained"
        return loss

    def end(self, loop):
        self.at_ends[loop] = (
            round(torch.stack(self.losses).mean().item(), 6),
            len(self.alias),
            dict(self.by_kind),
            self.seen,
            round(self.meter.total, 6),
            self.meter.count,
            round(self.sum.item(), 6),
            self.last_name,
            self.best,
        )
        if loop != "predict":
            self.log(f"{loop} loss", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()
        self.by_kind, self.seen, self.meter = defaultdict(list), set(), Meter()
        self.sum.zero_()

    def on_train_epoch_end(self):
        losses = torch.stack(self.train_losses)
        self.at_ends["train"] = (len(losses), round(losses.mean().item(), 6), self.last_name)
        self.log("train loss", losses.mean())
        self.train_losses.clear()

    def on_validation_epoch_end(self):
        self.end("validation")

    def on_test_epoch_end(self):
        self.end("test")

    def on_predict_epoch_end(self):
        self.end("predict")


class OutputCollector(Callback):
    """Collects what steps return, as every rank sees it."""

    def __init__(self):
        self.outputs, self.found = [], []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.outputs.append(outputs)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.found.append((len(self.outputs), len(pl_module.losses), round(torch.stack(self.outputs).mean().item(), 6)))
        self.outputs.clear()


def collected(strategy):
    """What the module and a callback found at the end of each kind of epoch."""
    seed_everything()
    module, collector = CollectingGPT(), OutputCollector()
    trainer = quiet_trainer(
        strategy if isinstance(strategy, str) else PTDPStrategy(**strategy),
        callbacks=[collector],
        max_epochs=2,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,
    )
    data = Data(BATCHES)
    trainer.fit(module, datamodule=data)
    logged = {name: round(float(value), 6) for name, value in trainer.callback_metrics.items()}
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)
    return module.at_ends, collector.found, logged


@pytest.mark.parametrize(
    "strategy", [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}]
)
def test_hooks_find_what_steps_collected(strategy):
    (one,) = run_spmd(collected, world_size=1, strategy={})
    assert one[0].keys() == {"train", "validation", "test", "predict"}
    layers = {"micro_batch_size": 4, **strategy}
    for found in run_spmd(collected, world_size=2, strategy=layers, timeout=60.0):
        assert found == one


def test_training_adds_an_entry_a_microbatch():
    strategy = {"pipeline_parallel_size": 2, "micro_batch_size": 2}
    for at_ends, _, _ in run_spmd(collected, world_size=2, strategy=strategy, timeout=60.0):
        assert (at_ends["train"][0], at_ends["validation"][1]) == (4, 2)


class HoldingGPT(CollectingGPT):
    """Keeps what cannot be sent."""

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.loss(batch))
        self.lock = threading.Lock()

    def on_validation_epoch_end(self):
        assert len(self.losses) == len(BATCHES), "the others are carried"


def validate_while_holding():
    told = pytest.warns(UserWarning, match=r"attributes \['lock'\] that pickle cannot save")
    with told if torch.distributed.get_rank() == 0 else nullcontext():
        quiet_trainer(PTDPStrategy(pipeline_parallel_size=2)).validate(HoldingGPT(), datamodule=Data(BATCHES))


def test_what_cannot_be_sent_is_named_and_left():
    run_spmd(validate_while_holding)
