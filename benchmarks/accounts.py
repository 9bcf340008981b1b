"""What a run keeps and sends, counted on each rank: for `memory.py` and for the tests that hold it to the formulas.

Letters as in the paper: b samples a microbatch, s sequence length, h hidden size, a heads, t, p, d parallel sizes.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning_ptdp.recipes.gpt.model import GPT
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.traffic import Traffic
from lightning_ptdp import PTDPStrategy


@dataclass(frozen=True)
class Sizes:
    """A GPT, and what it trains on: `batches` global batches of `batch` rows."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    length: int = 40
    vocabulary: int = 96
    dropout: float = 0.0
    batch: int = 4
    batches: int = 2


class Model(pl.LightningModule):
    """The GPT recipe's network on random tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.net = GPT(
            vocab_size=sizes.vocabulary,
            max_seq_len=sizes.length,
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_heads=sizes.heads,
            dropout=sizes.dropout,
            tie_embeddings=False,
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def train_dataloader(self) -> DataLoader[Tensor]:
        sizes = self.sizes
        where = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        rows = torch.randint(
            sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=torch.Generator().manual_seed(0)
        )
        return DataLoader([rows.chunk(where["num_replicas"])[where["rank"]]] * sizes.batches, batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Saved:
    """Bytes that a module's forward leaves for backward: each storage once, its parameters left out.

    weights: of copies of them in other dtypes, which autocast and norms make. activations: of everything else, the
    input included.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._seen: dict[int, tuple[int, bool]] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.of_calls: list[tuple[int, int]] = []
        """(activations, weights) of each call."""
        self._handles = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._exit, always_call=True),
        ]

    def remove(self) -> None:
        """Stop."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, *_: Any) -> None:
        self._seen = {}
        self._hooks.__enter__()

    def _exit(self, *_: Any) -> None:
        self._hooks.__exit__(None, None, None)
        found = list(self._seen.values())
        self.of_calls.append(
            (sum(size for size, is_copy in found if not is_copy), sum(size for size, is_copy in found if is_copy))
        )

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._seen[storage.data_ptr()] = storage.nbytes(), _is_copy_of_leaf(tensor)
        return tensor


def _is_copy_of_leaf(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    while node is not None and node.name() in ("ToCopyBackward0", "TBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


@dataclass
class Account:
    """Of one rank, for its second batch, by when shapes are known and envelopes have gone.

    activations, weights: bytes that a block keeps for a microbatch, the most over blocks and microbatches; see `Saved`.
    sent: elements by (axis, operation, dtype). peak_bytes: resident memory of the process, the most in its life.
    parameters: elements that it holds, and tensors.
    """

    activations: int = 0
    weights: int = 0
    sent: dict[tuple[str, str, str], Fraction] = field(default_factory=dict)
    peak_bytes: int = 0
    parameters: tuple[int, int] = (0, 0)

    def elements(self, axis: str, *operations: str, dtype: str = "float32") -> Fraction:
        """Sent along an axis: "tensor", "pipeline" or "data"."""
        return sum((self.sent.get((axis, operation, dtype), Fraction()) for operation in operations), Fraction())


class Accounts(Callback):
    """Counts."""

    def __init__(self) -> None:
        self.account = Account()
        self._traffic, self._saved = Traffic(), []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Model, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._saved = [Saved(block) for block in pl_module.net.blocks]
            self._traffic.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Model, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        account = self.account
        account.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if batch_idx != 1:
            return
        self._traffic.__exit__(None, None, None)
        calls = [call for saved in self._saved for call in saved.of_calls]
        for saved in self._saved:
            saved.remove()
        account.activations, account.weights = (max(column) for column in zip(*calls, strict=True))
        own = list(pl_module.parameters())
        account.parameters = sum(parameter.numel() for parameter in own), len(own)
        if not isinstance(trainer.strategy, PTDPStrategy):
            return
        groups = trainer.strategy.groups
        names = {getattr(groups, axis).group_name: axis for axis in ("tensor", "pipeline", "data")}
        for kind, count in self._traffic.sent.items():
            if kind.group in names:
                axis = names[kind.group], kind.operation, str(kind.dtype).removeprefix("torch.")
                account.sent[axis] = count


def activation_bytes(
    sizes: Sizes, b: int, *, t: int = 1, sequence_parallel: bool = False, scores: bool = True
) -> Fraction:
    """What a layer keeps for a microbatch in 16 bits at most, by arXiv 2205.05198.

    scores: whether attention scores are kept; not so with selective recomputation, nor in fused attention.
    """
    sbh = sizes.length * b * sizes.hidden
    kept = Fraction(5 * sizes.heads * sizes.length, sizes.hidden) if scores else Fraction()
    return sbh * (34 + kept) / t if sequence_parallel else sbh * (10 + (24 + kept) / t)


def pipeline_elements(sizes: Sizes, b: int, *, parts: int = 1) -> Fraction:
    """What a rank sends over a cut for a microbatch, one way. parts: t with scatter/gather."""
    return Fraction(b * sizes.length * sizes.hidden, parts)


def tensor_elements(sizes: Sizes, b: int, t: int, *, forwards: int = 1) -> Fraction:
    """What a rank sends to tensor peers for a layer and microbatch. forwards: 2 with full recomputation."""
    return Fraction((4 + 4 * forwards) * b * sizes.length * sizes.hidden * (t - 1), t)
