"""Small LightningModules as users write them: none knows of parallelism."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

Batch = dict[str, Any]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1),
    "adagrad": torch.optim.Adagrad,
}


class Attention(nn.Module):
    """Causal self-attention that leaves padding out."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = hidden // num_heads
        self.query, self.value, self.project = (nn.Linear(hidden, hidden) for _ in range(3))
        self.key = nn.Linear(hidden, hidden, bias=False)  # a bias has no gradient, and Adam makes steps of its rounding

    def forward(self, x: Tensor, is_real: Tensor | None) -> Tensor:
        """x: [b, s, h]. is_real: [b, s] bool, False for padding."""
        heads = [f(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if is_real is not None:
            allowed = allowed & (is_real[:, None, None, :] | torch.eye(x.shape[1], dtype=torch.bool, device=x.device))
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=allowed)
        return self.project(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward part, each added to what goes through."""

    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, num_heads)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        """x: [b, s, h]."""
        x = x + self.dropout(self.attention(self.norm_1(x), is_real))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(pl.LightningModule):
    """A decoder. Its batch is a dict of ids and labels; mask, positions and a string may come with them."""

    def __init__(
        self,
        *,
        num_layers: int = 4,
        hidden: int = 32,
        num_heads: int = 4,
        vocabulary: int = 64,
        max_length: int = 16,
        dropout: float = 0.0,
        tied: bool = False,
        optimizer: str = "sgd",
        lr: float = 0.1,
    ) -> None:
        super().__init__()
        self.optimizer_name, self.lr = optimizer, lr
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(max_length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, num_heads, dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.token.weight, std=0.1)
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor, positions: Tensor | None = None, is_real: Tensor | None = None) -> Tensor:
        """ids: [b, s]. Returns logits, [b, s, V]."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x, is_real)
        return self.head(self.norm(x))

    def loss(self, batch: Batch) -> Tensor:
        """Mean over the targets that are not -100."""
        logits = self(batch["ids"], batch.get("positions"), batch.get("is_real"))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log the loss."""
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss * 2 if batch.get("note") == "twice" else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One of OPTIMIZERS."""
        return OPTIMIZERS[self.optimizer_name](self.parameters(), lr=self.lr)


class ValidatedGPT(GPT):
    """With a validation step: Lightning warns of one where no validation data is."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch), sync_dist=True)


class PairBlock(nn.Module):
    """Takes and returns a tuple, of which the second part is whole numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Add to x, and count how deep it is."""
        return x + torch.tanh(self.linear(x)) / depth[:, None], depth + 1


class PairNet(pl.LightningModule):
    """Blocks that hand on a tuple."""

    def __init__(self, *, num_layers: int = 4, size: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Linear(size, size)
        self.blocks = nn.ModuleList(PairBlock(size) for _ in range(num_layers))
        self.head = nn.Linear(size, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean squared error."""
        x, depth = self.embed(batch["x"]), torch.ones(len(batch["x"]), dtype=torch.long)
        for block in self.blocks:
            x, depth = block(x, depth)
        return F.mse_loss(self.head(x / depth[:, None])[:, 0], batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class TableBlock(nn.Module):
    """Adds a table that it does not own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """table: [size], the same for every block."""
        return x + torch.tanh(self.linear(x) * table)


class TableNet(pl.LightningModule):
    """A learned table goes to every block: the strategy must be told that it is shared."""

    def __init__(self, *, num_layers: int = 4, size: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Linear(size, size)
        self.table = nn.Embedding(2, size)
        self.blocks = nn.ModuleList(TableBlock(size) for _ in range(num_layers))
        self.head = nn.Linear(size, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean squared error."""
        x, table = self.embed(batch["x"]), self.table(torch.ones((), dtype=torch.long))
        for block in self.blocks:
            x = block(x, table)
        return F.mse_loss(self.head(x)[:, 0], batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Scale(nn.Module):
    """Multiplies by one learned number, 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x * self.w


class TokenCosts(pl.LightningModule):
    """The loss of a token is its cost times two learned numbers that are both 1, so loss and gradients are one number.

    kind: how the step tells what its mean is over: by "cross_entropy" with ignored targets, by "weight" in its dict, or
    not at all ("by_hand": a mask on unreduced losses).
    """

    def __init__(self, *, kind: str = "cross_entropy", lr: float = 1.0) -> None:
        super().__init__()
        self.kind, self.lr = kind, lr
        self.blocks = nn.ModuleList([Scale(), Scale()])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """batch: costs [b, s], labels [b, s] of 0 or -100."""
        x = batch["costs"]
        for block in self.blocks:
            x = block(x)
        scores, labels = -x.flatten()[:, None], batch["labels"].flatten()
        if self.kind == "cross_entropy":
            return F.nll_loss(scores, labels)  # of one class: minus its score
        real = labels != -100
        loss = F.nll_loss(scores, labels, reduction="none").sum() / real.sum()
        return {"loss": loss, "weight": real.sum()} if self.kind == "weight" else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def token_costs(*rows: tuple[int, float], length: int = 8) -> Batch:
    """A batch for `TokenCosts`: for each row, how many of its tokens are real, and what each costs."""
    costs = torch.tensor([[cost] * length for _, cost in rows])
    labels = torch.tensor([[0] * real + [-100] * (length - real) for real, _ in rows])
    return {"costs": costs, "labels": labels}


def texts(
    num_rows: int, *, length: int = 16, vocabulary: int = 64, seed: int = 0, padded: bool = False, extras: bool = False
) -> Batch:
    """A batch for `GPT`. padded: rows end in ignored labels. extras: with mask, positions and a string."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (num_rows, length + 1), generator=generator)
    batch: Batch = {"ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
    num_real = torch.randint(1, length + 1, (num_rows, 1), generator=generator)
    is_real = torch.arange(length) < num_real
    if padded:
        batch["labels"][~is_real] = -100
    if extras:
        batch["is_real"] = is_real
        batch["positions"] = torch.arange(length).flip(0).expand(num_rows, length).clone()
        batch["note"] = "twice"
    return batch


def points(num_rows: int, *, size: int = 8, seed: int = 0) -> Batch:
    """A batch for `PairNet` and `TableNet`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_rows, size, generator=generator),
        "y": torch.randn(num_rows, generator=generator),
    }


class Rows(Dataset[Batch]):
    """The rows of a batch, one by one."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.batch.items()}


class TrainRows(pl.LightningDataModule):
    """The rows of a batch, in their own order; the last batch may be smaller."""

    def __init__(self, rows: Batch, *, batch_size: int) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def train_dataloader(self) -> DataLoader[Batch]:
        """An ordinary loader."""
        return DataLoader(Rows(self.rows), self.batch_size)


class Stream(IterableDataset[Batch]):
    """Rows that come without a length."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Batch]:
        rows = Rows(self.batch)
        return (rows[i] for i in range(len(rows)))


def llama_config() -> Any:
    """A small Llama of transformers, which must be installed: grouped-query attention, gate and up apart, rotary."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
