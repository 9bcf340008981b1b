"""Recomputation changes nothing but memory: losses and weights have the bits of a run without it (PO-15)."""

import math
import random
import warnings
from functools import partial
from unittest.mock import patch

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fits import Net, batches_of, fit
from tests.kept import Kept
from tests.live import LiveStorages
from tests.models import GPT, Attention, texts
from tests.spmd import run_spmd
from tests.trainer.test_tensor_parallel import SEQUENCE_PLAN

OFF, FULL, SELECTIVE = {}, {"recompute": "full"}, {"recompute": "selective"}
NAMED = {"recompute": "selective", "recompute_modules": ["blocks.*.attention"]}


# -- a GPT in every layout -----------------------------------------------------------------------------------------


class EagerAttention(Attention):
    """Written out, with dropout on the weights."""

    def forward(self, x, is_real):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for f in (self.query, self.key, self.value))
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / math.sqrt(self.head_size)).masked_fill(~allowed, -math.inf)
        weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        return self.project((weights @ v).transpose(1, 2).flatten(2))


class MeasuredGPT(GPT):
    """Notes the most bytes that the activations of microbatches in flight have, on this rank."""

    def __init__(self, **options):
        super().__init__(dropout=0.1, **options)
        for block in self.blocks:
            block.attention = EagerAttention(32, 4)
        self.live = Kept(LiveStorages())

    @property
    def notes(self):
        return self.live.value.peak

    def training_step(self, batch, batch_idx):
        with self.live.value:
            return super().training_step(batch, batch_idx)


def fits_of(modes, make, batches, strategy, trainer):
    """The fit in each mode, as this rank saw it."""
    return [fit(make, batches, strategy | mode, dict(trainer)) for mode in modes]


def assert_same_bits(fits):
    first, *others = fits
    for other in others:
        assert other.losses == first.losses
        assert other.weights.keys() == first.weights.keys()
        for name, value in first.weights.items():
            assert torch.equal(other.weights[name], value), f"{name} has other bits"


SPLIT = {"micro_batch_size": 1, "tensor_parallel_plan": SEQUENCE_PLAN}
LAYOUTS = {
    "both ways": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"precision": "32-true"}),
    "interleaved, in float64, on parts of the sequence": (
        {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "virtual_pipeline_size": 2,
            "sequence_parallel": True,
        },
        {"accumulate_grad_batches": 2},
    ),
    "pipeline and replicas": (
        {"pipeline_parallel_size": 2, "data_parallel_size": 2, "distributed_optimizer": True},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bits_of_no_recomputation_and_lives_on_less(layout):
    sizes, trainer = LAYOUTS[layout]
    every, rows = {"recompute": "full", "recompute_every": 2}, 4 * sizes.get("data_parallel_size", 1)
    ranks = run_spmd(
        fits_of,
        world_size=4,
        timeout=60,
        modes=[OFF, SELECTIVE, FULL, every, *([NAMED] if "sequence_parallel" in sizes else [])],
        make=partial(MeasuredGPT, tied=True),
        batches=[texts(rows, seed=i) for i in range(3 if layout == "both ways" else 2)],
        strategy=SPLIT | sizes,
        trainer=trainer,
    )
    for fits in ranks:
        assert_same_bits(fits)
        off, selective, full, grouped = (each.notes for each in fits[:4])
        assert off > selective > full > 0.95 * grouped, (off, selective, full, grouped)


# -- kinds of blocks -----------------------------------------------------------------------------------------------


class Kind(Net):
    """Blocks of a kind of its own."""

    def __init__(self, block, *, num_layers=4, **options):
        super().__init__(num_layers=0)
        self.blocks = nn.ModuleList(block(4, **options) for _ in range(num_layers))
        for member in self.blocks:
            member.owner = Kept(self)  # no child of the block
        self.seen = Kept([])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Note what the rank's own blocks and the logs say."""
        mine = [block for block in self.blocks if any(True for _ in block.parameters())]
        self.seen.value += [block.note() for block in mine if hasattr(block, "note")]
        self.seen.value += sorted((name, float(value)) for name, value in self.trainer.callback_metrics.items())

    def on_train_end(self):
        self.notes = self.seen.value


class Plain(nn.Module):
    """With dropout, whose last draw is no saved tensor's."""

    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, 8), nn.Linear(8, size)

    def mix(self, x):
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.2, self.training))

    def forward(self, x):
        return x + self.mix(x) * torch.rand(())


class Counting(Plain):
    """Computes with what earlier calls left behind: a number, a list, a table that it edits, and an attribute."""

    def __init__(self, size):
        super().__init__(size)
        self.calls, self.seen = 0, []
        self.register_buffer("table", torch.ones(size))

    def note(self):
        return self.calls, len(self.seen), self.latest.item(), self.table.tolist()

    def forward(self, x):
        x = x + self.mix(x) * self.table.clone() / (1 + self.calls + len(self.seen))
        self.calls += 1
        self.seen.append(self.calls)
        self.latest = x.detach().mean()
        self.table.lerp_(x.detach().mean(0).to(self.table.dtype), 0.1)
        return x


class Normed(Plain):
    """Batch norm: running statistics."""

    def __init__(self, size):
        super().__init__(size)
        self.norm = nn.BatchNorm1d(size)

    def note(self):
        return self.norm.running_mean.tolist(), self.norm.running_var.tolist(), self.norm.num_batches_tracked.item()

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Statistics(Plain):
    """Running statistics by hand, written without a trace."""

    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def note(self):
        return self.mean.tolist(), self.var.tolist()

    def forward(self, x):
        return x + self.mix(F.batch_norm(x, self.mean, self.var, training=self.training))


class HostDraws(Plain):
    """Draws from Python's and NumPy's generators."""

    def forward(self, x):
        return x + self.mix(x) * random.random() * float(numpy.random.rand())


class Logging(Plain):
    """Logs in its forward."""

    def forward(self, x):
        self.owner.value.log("mean", x.detach().mean(), reduce_fx="sum", on_step=True, on_epoch=True)
        return super().forward(x)


class Checkpointing(Plain):
    """Recomputes a part of itself already."""

    def forward(self, x):
        return x + checkpoint(self.mix, x, use_reentrant=False)


class Frozen(Plain):
    """Trains in one block of four."""

    made = 0

    def __init__(self, size):
        super().__init__(size)
        type(self).made += 1
        self.requires_grad_(type(self).made % 4 == 3)


class WithoutGraph(Plain):
    """Runs a part of itself without a graph."""

    def forward(self, x):
        with torch.no_grad():
            shift = self.mix(x)
        return x + self.mix(x + shift)


KINDS = {
    "plain": Plain,
    "state": Counting,
    "batch norm": Normed,
    "untracked statistics": Statistics,
    "host draws": HostDraws,
    "logging": Logging,
    "own checkpoint": Checkpointing,
    "frozen": Frozen,
    "partly without a graph": WithoutGraph,
}


class Structured(pl.LightningModule):
    """Blocks with several inputs, by position and by name, and several outputs in a structure; the first takes ids."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(8, 4), *(StructuredBlock(i) for i in range(3))])
        self.head = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        ids = (batch["x"] * 3).long().abs().clamp(max=7)
        x, extra, trail = self.blocks[0](ids), {"depth": torch.zeros(len(ids), dtype=torch.long), "sum": None}, []
        for block in self.blocks[1:]:
            x, extra = block(x, ["twice", 2], extra=extra, trail=trail)
        assert len(trail) <= 3  # those of the stage
        return F.mse_loss(self.head(x).mean((1, 2)) + extra["sum"], batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StructuredBlock(nn.Module):
    """Adds to the caller's list, and to what it hands on."""

    def __init__(self, index):
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)

    def forward(self, x, words, *, extra, trail):
        trail.append(words[0])
        y = F.dropout(torch.tanh(self.linear(x)) * words[1], 0.1, self.training) + extra["depth"][:, None, None]
        total = y.mean((1, 2)) if extra["sum"] is None else extra["sum"] + y.mean((1, 2))
        return x + y, {"depth": extra["depth"] + 1, "sum": total}


class Between(Kind):
    """Code between the blocks: one changes the activation, one edits it in place."""

    def __init__(self):
        super().__init__(Plain)

    def forward(self, x):
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = x * 2 if i == 0 else x.add_(1) if i == 2 else x
        return self.head(x)[:, 0]


class Manual(Kind):
    """Goes back twice through one graph, and steps by hand."""

    def __init__(self):
        super().__init__(Plain)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = self.loss(batch), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)
        optimizer.step()


def modes_of(kinds, modes, strategy, trainer):
    """The fits of each kind in each mode, as this rank saw them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the statistics of .* are those of a microbatch")
        return {name: fits_of(modes, make, batches_of(6, 6), strategy, trainer) for name, make in kinds.items()}


MODES = [OFF, FULL, {"recompute": "full", "recompute_every": 3}]
MAKES = {name: partial(Kind, block) for name, block in KINDS.items()}
MAKES |= {"structures": Structured, "code between": Between}


def assert_kinds_agree(found):
    for name, fits in found.items():
        try:
            assert_same_bits(fits)
            assert all(each.notes == fits[0].notes for each in fits)
        except AssertionError as error:
            error.add_note(f"of {name}")
            raise


@pytest.mark.parametrize(
    "strategy",
    [{"micro_batch_size": 6}, {"micro_batch_size": 2}, {"micro_batch_size": 2, "pipeline_parallel_size": 2}],
    ids=["batches whole", "microbatches", "pipeline"],
)
def test_every_kind_of_block_has_the_bits_of_no_recomputation(strategy):
    world_size = strategy.get("pipeline_parallel_size", 1)
    kinds = MAKES | ({"manual optimization": Manual} if strategy["micro_batch_size"] == 6 else {})
    modes = MODES if world_size == 1 else [OFF, MODES[-1]]
    for found in run_spmd(modes_of, world_size, 60, kinds=kinds, modes=modes, strategy=strategy, trainer={}):
        assert_kinds_agree(found)


def test_attention_that_keeps_no_scores_is_told_once():
    told = run_spmd(remarks, world_size=2, make=partial(GPT, num_layers=2))
    assert [len(texts) for texts in told] == [1, 1]
    assert "recompute='selective' has nothing to recompute" in told[0][0]
    assert run_spmd(remarks, world_size=2, make=partial(MeasuredGPT, num_layers=2)) == [[], []]


def remarks(make):
    """What the strategy said on this rank of recomputation, where rank 0 is the one to print it."""
    with patch("lightning_ptdp.strategy.rank_zero_info") as said:
        strategy = {"pipeline_parallel_size": 2, "recompute": "selective"}
        fit(make, [texts(2, seed=i) for i in range(2)], strategy, {"max_epochs": 2})
    return [call.args[0] for call in said.call_args_list if call.args[0].startswith("recompute=")]
