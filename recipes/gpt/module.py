"""GPTModule: the training of a GPT, as any LightningModule."""

import math
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_ptdp.data import IGNORED, TextDataModule
from lightning_ptdp.nn.functional import cross_entropy

from .hugging_face import to_gpt2
from .model import GPT

Batch = dict[str, Tensor]


class GPTModule(L.LightningModule):
    """Trains a GPT to predict the next token: AdamW, linear warm-up, cosine decay.

    A batch is a dict of "input_ids" and "labels", [b, s] int64 each; labels of -100 don't count.
    Logs train_loss and val_loss, nats a token.

    Args:
        vocab_size: tokens of the vocabulary, V; at least the tokenizer's.
        max_seq_len: the longest sequence, at least the data's seq_len.
        num_layers: blocks, l.
        hidden_size: h.
        num_heads: attention heads, a divisor of hidden_size.
        dropout: probability of dropout.
        tie_embeddings: one matrix for the embedding and the head.
        learning_rate: the highest, reached at the end of warm-up.
        min_learning_rate: the lowest, reached at the end of training.
        warmup_steps: optimizer steps of linear warm-up.
        weight_decay: of matrices; biases and norms have none.
        betas: of AdamW.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 8192,
        max_seq_len: int = 1024,
        num_layers: int = 12,
        hidden_size: int = 768,
        num_heads: int = 12,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
        learning_rate: float = 6e-4,
        min_learning_rate: float = 6e-5,
        warmup_steps: int = 100,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.learning_rate = learning_rate
        self.min_learning_rate = min_learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.betas = betas
        self.net: GPT | None = None
        self._build = partial(
            GPT,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            dropout=dropout,
            tie_embeddings=tie_embeddings,
        )

    def configure_model(self) -> None:
        """Build the network, once, where the strategy wants it built."""
        if self.net is None:
            self.net = self._build()

    def setup(self, stage: str) -> None:
        """Check that model and data agree on the vocabulary and the sequence length."""
        datamodule = getattr(self.trainer, "datamodule", None)
        if isinstance(datamodule, TextDataModule):
            check_fits("vocab_size", self.vocab_size, datamodule.prepared.vocab_size, "the tokens of the tokenizer")
            check_fits("max_seq_len", self.max_seq_len, datamodule.seq_len, "seq_len of the data")

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next tokens: [b, s] -> [b, s, V]."""
        assert self.net is not None, "Lightning calls configure_model before forward"
        logits: Tensor = self.net(ids)
        return logits

    def training_step(self, batch: Batch) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def to_hugging_face(self) -> Any:
        """The network as a GPT2LMHeadModel of transformers, which `ptdp export --to hf` saves."""
        assert self.net is not None, "Lightning calls configure_model before weights are loaded"
        return to_gpt2(self.net)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(
            parameter_groups(self, weight_decay=self.weight_decay),
            lr=self.learning_rate,
            betas=(self.betas[0], self.betas[1]),
        )
        shape = partial(
            warmup_cosine,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            lowest=self.min_learning_rate / self.learning_rate,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: Batch) -> Tensor:
        logits = self(batch["input_ids"])
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: float, lowest: float) -> float:
    """The factor of the learning rate at an optimizer step, the first being 0: linear to 1, then a half cosine.

    total_steps: where the factor reaches `lowest`, and stays; infinite keeps it at 1 after warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if math.isinf(total_steps):
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, which decay, and vectors (biases, norms), which don't."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def check_fits(option: str, given: int, needed: int, what: str) -> None:
    """Raise ValueError if the model's `option` is smaller than the data needs."""
    if given < needed:
        raise ValueError(
            f"{option} of the model must be at least {what}; got {option}={given} and {what} = {needed}; "
            f"set model.{option} to {needed} or more"
        )
