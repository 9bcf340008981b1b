"""Tensor parallelism through the Trainer: what is refused, what is drawn, and what an uneven vocabulary costs."""

import math
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, assert_same, parallel, quiet_trainer, serial
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN, Layout
from tests.trainer.test_refusals import refusals

SEQUENCE_PLAN = PLAN | {"blocks.*.norm_1": "sequence_parallel", "blocks.*.norm_2": "sequence_parallel"}


# -- refusals (PO-05) ----------------------------------------------------------------------------------------------


def test_heads_must_be_a_multiple_of_the_peers():
    text = refusals(partial(GPT, hidden=12), world_size=3, tensor_parallel_size=3, tensor_parallel_plan=PLAN)
    assert "'blocks.0.attention.query' has 4 heads, and tensor_parallel_size=3; use one of [1, 2, 4]" in text


def test_wrong_number_of_processes_and_heads_are_told_at_once():
    text = refusals(
        partial(GPT, hidden=12),
        world_size=2,
        tensor_parallel_size=3,
        pipeline_parallel_size=2,
        tensor_parallel_plan=PLAN,
    )
    assert "got 2 processes for tensor_parallel_size=3 * pipeline_parallel_size=2 = 6" in text
    assert "'blocks.0.attention.query' has 4 heads, and tensor_parallel_size=3" in text


def test_module_without_a_plan_is_shown_one():
    text = refusals(tensor_parallel_size=2)
    assert "tensor_parallel_size=2 needs a plan that says how to split the layers" in text
    assert '"blocks.*.attention.query": "colwise",  # 32 -> 32' in text
    assert '"blocks.*.down": "rowwise",  # 64 -> 32' in text


def test_sequence_must_be_a_multiple_of_the_peers():
    told = run_spmd(refused_sequence, world_size=2)
    assert told[0] == told[1]
    assert "the sequence must be a multiple of tensor_parallel_size; got activations (4, 15, 32)" in told[0]
    assert "pad the sequences, or use sequence_parallel=False" in told[0]


def refused_sequence():
    strategy = PTDPStrategy(
        tensor_parallel_size=2, sequence_parallel=True, tensor_parallel_plan=SEQUENCE_PLAN, micro_batch_size=4
    )
    with pytest.raises(ValueError, match="sequence parallelism gives each tensor peer an equal part") as caught:
        quiet_trainer(strategy).fit(GPT(), datamodule=ReplicaBatches([texts(4, length=15)]))
    return str(caught.value)


# -- parts of the sequence -----------------------------------------------------------------------------------------

SEQUENCE_LAYOUTS = {
    "alone": Layout(t=2),
    "tied, uneven vocabulary": Layout(
        t=2, options={"tied": True, "vocabulary": 61}, make_batch=partial(texts, vocabulary=61), clip=0.1
    ),
    "pipeline": Layout(t=2, p=2, make_batch=partial(texts, padded=True)),
    "interleaved": Layout(t=2, p=2, v=2, options={"tied": True}, accumulate=2, sizes=(4, 4)),
    "replicas": Layout(t=2, d=2, options={"optimizer": "adamw", "lr": 0.01}, clip=0.1),
    "peers of four": Layout(t=4, b=4),
}


@pytest.mark.parametrize("layout", SEQUENCE_LAYOUTS.values(), ids=SEQUENCE_LAYOUTS)
def test_sequence_parallelism_gives_the_numbers_of_one_process(layout):
    make = partial(GPT, **layout.options)
    batches = [layout.make_batch(size, seed=i) for i, size in enumerate(layout.sizes)]
    run, _ = parallel(
        make,
        batches,
        trainer={"accumulate_grad_batches": layout.accumulate, "gradient_clip_val": layout.clip},
        tensor_parallel_size=layout.t,
        pipeline_parallel_size=layout.p,
        data_parallel_size=layout.d,
        virtual_pipeline_size=layout.v,
        micro_batch_size=layout.b,
        tensor_parallel_plan=SEQUENCE_PLAN,
        sequence_parallel=True,
    )
    assert_same(run, serial(make, batches, accumulate=layout.accumulate, clip=layout.clip))


# -- vocabulary of 61 (PO-20) --------------------------------------------------------------------------------------


class ZeroHead(GPT):
    """All classes are equally likely at first."""

    def __init__(self):
        super().__init__(vocabulary=61)
        nn.init.zeros_(self.head.weight)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_no_pad_row_enters_the_softmax(t):
    batches = [texts(4, vocabulary=61, seed=i) for i in range(3)]
    plan = {"tensor_parallel_plan": PLAN} if t > 1 else {}
    run, _ = parallel(ZeroHead, batches, tensor_parallel_size=t, micro_batch_size=4, **plan)
    assert run.losses[0] == pytest.approx(math.log(61), abs=1e-12)
    one = serial(ZeroHead, batches)
    assert_same(run, one)
    assert run.losses == pytest.approx(one.losses, abs=1e-12)


# -- weights used on a part (PO-26) --------------------------------------------------------------------------------


class HeadNormAttention(nn.Module):
    """One norm weight of head size, shared by all heads."""

    def __init__(self):
        super().__init__()
        self.head_size = 8
        self.query, self.key, self.value, self.project = (nn.Linear(32, 32) for _ in range(4))
        self.head_norm = nn.RMSNorm(8)

    def forward(self, x, is_real):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class HeadNormGPT(GPT):
    """With a norm of heads in every block."""

    def __init__(self):
        super().__init__(num_layers=2)
        for block in self.blocks:
            block.attention = HeadNormAttention()


def test_summed_norm_of_heads_equals_plain_and_peers_stay_the_same():
    batches = [texts(4, seed=i) for i in range(5)]
    plan = PLAN | {"blocks.*.attention.head_norm": "replicated_with_grad_allreduce"}
    run, _ = parallel(HeadNormGPT, batches, tensor_parallel_size=2, tensor_parallel_plan=plan)  # compares peers' bits
    assert_same(run, serial(HeadNormGPT, batches))


def test_forgotten_norm_of_heads_is_refused_on_the_first_batch():
    told = run_spmd(refused_disagreement, world_size=2)
    assert told[0] == told[1]
    text, num_batches = told[0]
    assert "disagree on the gradients of ['blocks.0.attention.head_norm.weight', " in text
    assert "'blocks.1.attention.head_norm.weight'], which each holds whole" in text
    assert 'give them the style "replicated_with_grad_allreduce" in tensor_parallel_plan' in text
    assert num_batches == 0


def refused_disagreement():
    strategy = PTDPStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    trainer = quiet_trainer(strategy, precision="64-true")
    with pytest.raises(ValueError, match="tensor-parallel peers disagree") as caught:
        trainer.fit(HeadNormGPT(), datamodule=ReplicaBatches([texts(4, seed=i) for i in range(2)]))
    return str(caught.value), trainer.global_step


# -- draws (PO-16) -------------------------------------------------------------------------------------------------


class DrawingBlock(nn.Module):
    """Remembers the masks that it draws where activations are whole, and where they are split."""

    def __init__(self, seen):
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(4, 8), nn.Linear(8, 4), seen

    def forward(self, x):
        self.seen["before"].append(mask())
        y = torch.tanh(self.up(x))
        self.seen["split"].append(mask())
        y = self.down(y)
        self.seen["after"].append(mask())
        return x + y


def mask():
    return tuple(F.dropout(torch.ones(64), 0.5, training=True).tolist())


class DrawingNet(pl.LightningModule):
    """Two blocks that draw."""

    def __init__(self):
        super().__init__()
        self.seen = {"before": [], "split": [], "after": []}
        self.blocks = nn.ModuleList(DrawingBlock(self.seen) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def draws(d):
    """What this rank drew in three steps of two microbatches, its place, and its next draw afterwards."""
    seed_everything()
    module = DrawingNet()
    strategy = PTDPStrategy(
        tensor_parallel_size=2,
        data_parallel_size=d,
        micro_batch_size=1,
        tensor_parallel_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    )
    trainer = quiet_trainer(strategy, use_distributed_sampler=False)
    trainer.fit(module, datamodule=ReplicaBatches([torch.ones(2 * d, 4)] * 3))
    return trainer.strategy.groups.at.data, module.seen, torch.get_rng_state().tolist()


def test_tensor_peers_draw_alike_in_whole_places_and_apart_in_split_ones():
    results = run_spmd(draws, world_size=4, d=2)
    split_masks, whole_masks = set(), set()
    for replica in (0, 1):
        (_, one, _), (_, other, _) = [result for result in results if result[0] == replica]
        assert one["before"] == other["before"]
        assert one["after"] == other["after"]
        for seen in (one, other):
            assert len(seen["split"]) == 12, "three steps of two microbatches and two blocks"
            split_masks.update(seen["split"])
        whole_masks.update(one["before"] + one["after"])
    assert len(split_masks) == 4 * 12, "no two peers, replicas, microbatches, blocks or steps have the same mask"
    assert len(whole_masks) == 2 * 24
    assert all(result[2] == results[0][2] for result in results), "the default generators stand alike afterwards"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_leaves_peers_in_step(sequence_parallel):
    """`join` compares the bits of what peers hold whole, after each of five steps."""
    batches = [texts(4, seed=i) for i in range(5)]
    run, _ = parallel(
        partial(GPT, num_layers=2, dropout=0.5),
        batches,
        tensor_parallel_size=2,
        tensor_parallel_plan=SEQUENCE_PLAN,
        sequence_parallel=sequence_parallel,
    )
    assert len(run.weights) == 5


@pytest.mark.parametrize("t", [2, 4])
def test_initial_weights_have_the_bits_of_one_process(t):
    make = partial(GPT, tied=True, vocabulary=61)
    run, _ = parallel(make, [texts(4, vocabulary=61)], tensor_parallel_size=t, tensor_parallel_plan=PLAN)
    one = serial(make, [texts(4, vocabulary=61)])
    assert run.initial.keys() == one.initial.keys()
    assert all(torch.equal(run.initial[name], value) for name, value in one.initial.items())


# -- a plan of the module's own ------------------------------------------------------------------------------------


class PlannedGPT(GPT):
    """Carries its plan."""

    tensor_parallel_plan = PLAN


def test_plan_that_the_module_carries_is_enough():
    batches = [texts(4, seed=i) for i in range(2)]
    run, _ = parallel(PlannedGPT, batches, tensor_parallel_size=2)
    assert_same(run, serial(PlannedGPT, batches))


class EditingGPT(GPT):
    """Uses its logits in ways that the split loss does not know, and logs what it finds."""

    def loss(self, batch):
        logits = self(batch["ids"])
        logits[..., 0] = -5.0
        self.log("accuracy", (logits.argmax(-1) == batch["labels"]).double().mean(), sync_dist=True)
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], weight=torch.ones(64).double())


def test_edited_logits_train_as_in_one_process():
    batches = [texts(4, seed=i) for i in range(2)]
    run, _ = parallel(EditingGPT, batches, tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    assert_same(run, serial(EditingGPT, batches))


class RankZeroReader(GPT):
    """Reads its logits on global rank 0 only, in validation."""

    def validation_step(self, batch, batch_idx):
        logits = self(batch["ids"])
        if self.trainer.is_global_zero:
            self.read = logits.argmax(-1).sum()
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), sync_dist=True)


def test_validation_code_of_one_rank_does_not_hang_its_peers():
    values = run_spmd(validated_loss, world_size=2)
    seed_everything()
    expected = GPT(vocabulary=61).double().loss(texts(4, vocabulary=61)).item()
    assert values == [pytest.approx(expected, abs=1e-10)] * 2


def validated_loss():
    seed_everything()
    module = RankZeroReader(vocabulary=61)
    strategy = PTDPStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    trainer = quiet_trainer(strategy, precision="64-true")
    loader = torch.utils.data.DataLoader([texts(4, vocabulary=61)], batch_size=None)
    return trainer.validate(module, loader, verbose=False)[0]["val_loss"]
