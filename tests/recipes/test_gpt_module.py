"""The GPT recipe's training: the schedule, the groups, and a loss that falls in an ordinary Trainer."""

import math

import lightning as L
import pytest
import torch
from lightning_ptdp.recipes.gpt import GPTModule
from lightning_ptdp.recipes.gpt.module import parameter_groups, warmup_cosine
from torch.utils.data import DataLoader

from lightning_ptdp.data import TextDataModule

SIZES = {"vocab_size": 64, "max_seq_len": 16, "num_layers": 2, "hidden_size": 32, "num_heads": 4}
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Losses(L.Callback):
    """Keeps the training losses."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.values.append(trainer.callback_metrics["train_loss"].item())


def one_batch(num_steps: int) -> DataLoader:
    window = torch.arange(17).repeat(4, 1)
    sample = {"input_ids": window[:, :-1], "labels": window[:, 1:]}
    return DataLoader([sample] * num_steps, batch_size=None)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders and loggers
def test_the_loss_of_one_batch_falls_under_the_stock_strategy():
    losses = Losses()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trainer = L.Trainer(**QUIET, max_steps=3, callbacks=[losses])
        trainer.fit(GPTModule(**SIZES, learning_rate=0.01, warmup_steps=1), one_batch(3), one_batch(1))
    assert losses.values[0] == pytest.approx(math.log(64), abs=0.1)  # an untrained model knows nothing
    assert losses.values[0] > losses.values[1] > losses.values[2]
    assert trainer.callback_metrics["val_loss"] < losses.values[2]


def test_ignored_labels_do_not_count():
    with torch.random.fork_rng():
        module = GPTModule(**SIZES)
        module.configure_model()
    batch = next(iter(one_batch(1)))
    padded = {"input_ids": batch["input_ids"], "labels": batch["labels"].clone()}
    padded["labels"][2:] = -100
    torch.testing.assert_close(module._loss(padded), module._loss({name: part[:2] for name, part in batch.items()}))


def test_the_learning_rate_warms_up_and_falls():
    factors = [warmup_cosine(step, warmup_steps=4, total_steps=12, lowest=0.1) for step in (0, 1, 3, 4, 8, 12, 99)]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_endless_training_keeps_the_learning_rate():
    assert warmup_cosine(10**6, warmup_steps=4, total_steps=math.inf, lowest=0.1) == 1.0


def test_matrices_decay_and_vectors_do_not():
    module = GPTModule(**SIZES)
    with torch.random.fork_rng():
        module.configure_model()
    decaying, other = parameter_groups(module, weight_decay=0.1)
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decaying["params"]} == {2}
    assert {parameter.ndim for parameter in other["params"]} == {1}
    assert len(decaying["params"]) + len(other["params"]) == len(list(module.parameters()))


def test_the_network_is_built_once():
    module = GPTModule(**SIZES)
    assert list(module.parameters()) == []
    with torch.random.fork_rng():
        module.configure_model()
        net = module.net
        module.configure_model()
    assert module.net is net


def test_hyperparameters_are_plain_values():
    module = GPTModule(**SIZES)
    assert {type(value) for value in module.hparams.values()} <= {int, float, bool, tuple}
    assert module.hparams["vocab_size"] == 64


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders and loggers
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 200}, "vocab_size=200 and the tokens of the tokenizer = 257; set model.vocab_size to 257"),
        ({"vocab_size": 257, "max_seq_len": 4}, "max_seq_len=4 and seq_len of the data = 8"),
    ],
)
def test_a_model_too_small_for_the_data_is_refused(tmp_path, sizes, message):
    (tmp_path / "a.txt").write_text("some text")
    data = TextDataModule(
        paths=str(tmp_path / "a.txt"), vocab_size=257, seq_len=8, val_fraction=0.0, cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(ValueError, match=message):
        L.Trainer(**QUIET, max_steps=1).fit(GPTModule(**{**SIZES, **sizes}), datamodule=data)
