"""A check leaves the user's module, batch and process as they were."""

import threading

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp.check.dropout import NoDropout, without_recurrent_dropout
from tests.check.test_check import check
from tests.models import GPT, PairNet, points, texts
from tests.trainer.test_layouts import PLAN


def test_module_and_batch_stay_as_they_are():
    module, batch = GPT(num_layers=2, dropout=0.1), texts(4)
    module.head.weight.grad = torch.ones_like(module.head.weight)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    classes = [type(child) for child in module.modules()]
    ids = batch["ids"].clone()
    report = check(lambda: module, batch, t=2, p=2, tensor_parallel_plan=PLAN)
    assert report.ok
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert [type(child) for child in module.modules()] == classes
    assert [name for name, p in module.named_parameters() if p.grad is not None] == ["head.weight"]
    assert module.dtype == torch.float32
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert torch.equal(batch["ids"], ids)
    assert torch.get_default_dtype() == torch.float32


class Locked(PairNet):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_module_that_cannot_be_copied_is_told():
    with pytest.raises(ValueError, match=r"Locked cannot be copied: copy.deepcopy says TypeError: cannot pickle"):
        check(Locked, points(4), p=2)


class Scaled(PairNet):
    """Works on what its hook makes of a batch."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch["columns"] * 2, "y": batch["target"]}


def test_transfer_hooks_of_the_module_run_once():
    batch = points(4)
    hooked = check(Scaled, {"columns": batch["x"] / 2, "target": batch["y"]}, p=2)
    assert hooked.ok
    assert hooked.loss_whole == check(PairNet, batch, p=2).loss_whole


class Asking(PairNet):
    """Asks its Trainer, and logs."""

    def training_step(self, batch):
        loss = super().training_step(batch, 0)
        self.log_dict({"loss": loss, "step": float(self.trainer.global_step)})
        return loss * 2**self.trainer.max_epochs


def test_step_may_ask_its_trainer():
    module = Asking()
    module.trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    plain = PairNet()
    plain.load_state_dict(module.state_dict())
    asked, expected = (check(lambda each=each: each, points(4), p=2) for each in (module, plain))
    assert asked.ok
    assert asked.loss_whole == pytest.approx(8 * expected.loss_whole)


class Late(pl.LightningModule):
    """Is built in configure_model."""

    def configure_model(self):
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = PairNet()

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)


def test_module_is_built_in_the_copies():
    module = Late()
    assert check(lambda: module, points(4), p=2, d=2).ok
    assert not hasattr(module, "net")


ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.5)
DROPPING = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "by name": lambda x: F.dropout(input=x, p=0.5, training=True),
    "by default": F.dropout,
    "of channels": lambda x: F.dropout1d(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "of features": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "operation": lambda x: torch.dropout(x, 0.5, True),
    "module": nn.Dropout(0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "attention by place": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
    "module of attention": lambda x: ATTENTION(x, x, x)[0],
}


@pytest.mark.parametrize("drop", DROPPING.values(), ids=DROPPING)
def test_nothing_is_dropped(drop):
    x = torch.ones(2, 3, 4)
    with NoDropout() as mode:
        first, second = drop(x), drop(x)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert mode.has_dropped


def test_recurrent_layers_drop_nothing():
    module = nn.Sequential(nn.LSTM(4, 4, num_layers=2, dropout=0.5))
    without_recurrent_dropout(module)
    x = torch.ones(3, 4)
    assert torch.equal(module(x)[0], module(x)[0])
