"""Wrong plans, splits and modules are told, with the parameter and a reason."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.check.test_check import check
from tests.models import GPT, Block, PairNet, TableNet, TokenCosts, points, texts, token_costs
from tests.trainer.test_layouts import PLAN


def without(*names):
    return {name: style for name, style in PLAN.items() if not name.endswith(names)}


class HeadNorm(GPT):
    """Norms the heads of the query, each by the same learned weights."""

    def __init__(self):
        super().__init__(num_layers=2)
        for block in self.blocks:
            block.attention.query = nn.Sequential(
                block.attention.query, nn.Unflatten(-1, (-1, 8)), nn.LayerNorm(8), nn.Flatten(-2, -1)
            )


class Mix(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Mixed(GPT):
    """A softmax where the feed-forward part is split."""

    def __init__(self):
        super().__init__(num_layers=2)
        for block in self.blocks:
            block.up = nn.Sequential(block.up, Mix())


class Normed(PairNet):
    """Batch norm before the blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.BatchNorm1d(8))


class Sum(PairNet):
    """The loss is a sum over the rows."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * len(batch["x"])


class Pairwise(PairNet):
    """Compares the rows of a batch with each other."""

    def training_step(self, batch, batch_idx):
        x, depth = self.embed(batch["x"]), torch.ones(len(batch["x"]), dtype=torch.long)
        for block in self.blocks:
            x, depth = block(x, depth)
        return F.cross_entropy(x @ x.T, torch.arange(len(x)))


class Noisy(PairNet):
    """Draws slopes at random."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.RReLU(0.1, 0.3))


class NoisyByHand(PairNet):
    """Draws noise outside of modules."""

    def training_step(self, batch, batch_idx):
        return super().training_step({**batch, "x": batch["x"] + torch.rand(())}, batch_idx)


class Noting(Block):
    """Leaves the size of its output for the loss."""

    def forward(self, x, is_real=None):
        y = super().forward(x, is_real)
        self.note = y.square().mean()
        return y


class SideLoss(GPT):
    """Adds what blocks left."""

    def __init__(self):
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(Noting(32, 4, 0.0) for _ in range(2))

    def loss(self, batch):
        loss = super().loss(batch)
        return loss + sum(getattr(block, "note", 0.0) for block in self.blocks)


class Borrowed(GPT):
    """Embeds with the head's weights, without tying them."""

    def __init__(self):
        super().__init__(num_layers=2)
        del self.token

    def forward(self, ids, positions=None, is_real=None):
        x = F.embedding(ids, self.head.weight) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, is_real)
        return self.head(self.norm(x))


TWO = partial(GPT, num_layers=2)
COSTS = token_costs((8, 1.0), (2, 3.0), (5, 2.0), (1, 7.0))

HOLLOW = "a stage used the values of a module that another stage owns"

# make, batch, options -> parameters that differ (None: all), what the reason says
WRONG = {
    "weight used on own heads": (
        HeadNorm,
        texts(4),
        {"t": 2, "p": 2, "tensor_parallel_plan": {n.replace("query", "query.0"): s for n, s in PLAN.items()}},
        {f"blocks.{i}.attention.query.2.{leaf}" for i in range(2) for leaf in ("weight", "bias")},
        ['give it the style "replicated_with_grad_allreduce"'],
    ),
    "softmax over a split dim": (
        Mixed,
        texts(4),
        {"t": 2, "tensor_parallel_plan": {n.replace("up", "up.0"): s for n, s in PLAN.items()}},
        None,
        [
            "values first differ in the output of 'blocks.0.down' (style rowwise)",
            "'blocks.0.up.1'",
            "'blocks.0.norm_2' is right",
        ],
    ),
    "table of another stage": (
        TableNet, points(8), {"p": 2}, None,
        [HOLLOW, "'table'; with shared=['table'] the loss is right"],
    ),
    "weights of another stage": (
        Borrowed, texts(4), {"p": 2, "last": ["head"]}, None,
        [HOLLOW, "'head'; with shared=['head'] the loss is right"],
    ),
    "values beside the activation": (
        SideLoss, texts(4), {"p": 2}, None, ["an attribute, a hook or a list that later code reads"],
    ),
    "batch norm": (Normed, points(8), {"p": 2, "b": 2}, None, ["batch norm ('embed.1') normalises over the rows"]),
    "batch norm over replicas": (Normed, points(8), {"d": 2}, None, ["batch norm ('embed.1') normalises"]),
    "sum": (Sum, points(8), {"d": 2, "b": 2}, None, ["whole batch is 4 times that of a microbatch, so it is a sum"]),
    "rows compared": (Pairwise, points(8), {"d": 2}, None, ["an operation works on several rows at once"]),
    "weights not told": (
        partial(TokenCosts, kind="by_hand"),
        {"costs": COSTS["costs"], "labels": COSTS["labels"]},
        {"d": 2},
        "error",
        ["how much each microbatch counts cannot be told", "the same happens with a batch cut in one process alone"],
    ),
    "random slopes": (Noisy, points(8), {"p": 2}, None, ["the step draws random numbers ('embed.1')"]),
    "random code": (NoisyByHand, points(8), {"d": 2}, None, ["random numbers (code outside of leaf modules)"]),
    "module in the wrong place": (
        TableNet, points(8), {"p": 2, "last": ["embed"]}, "error",
        ["'embed' ran before the last block", "name it in first=[...]", "the same happens with a pipeline alone"],
    ),
    "half of a pair": (
        TWO, texts(4), {"t": 2, "p": 2, "tensor_parallel_plan": without("down")}, "error",
        ["raised in 'blocks.0.down' (style in the plan: none)", "with tensor peers alone", "must name both of a pair"],
    ),
    "one of three projections": (
        TWO, texts(4), {"t": 2, "tensor_parallel_plan": without("query")}, "error",
        ["raised in 'blocks.0.attention' (style in the plan: none)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "batch", "options", "names", "said"), WRONG.values(), ids=WRONG)
def test_wrong_is_told_with_a_reason(make, batch, options, names, said):
    report = check(make, batch, **options)
    assert not report.ok
    text = str(report)
    assert "This layout does NOT compute what one process computes." in text
    for words in said:
        assert words in text
    if names == "error":
        assert report.error
        assert not report.parameters
        return
    assert not report.error
    different = {parameter.name for parameter in report.different}
    assert different
    assert names is None or different == names
    for parameter in report.different:
        assert parameter.reason in report.reasons
        assert said[0] in parameter.reason or names is None


def test_remedy_of_a_reason_passes():
    plan = {n.replace("query", "query.0"): s for n, s in PLAN.items()}
    plan["blocks.*.attention.query.2"] = "replicated_with_grad_allreduce"
    assert check(HeadNorm, texts(4), t=2, p=2, tensor_parallel_plan=plan).ok


def test_each_parameter_has_the_reason_of_its_axis():
    plan = {n.replace("query", "query.0"): s for n, s in PLAN.items()}
    report = check(HeadNorm, texts(4), t=2, tensor_parallel_plan=plan)
    told = {parameter.name: parameter for parameter in report.parameters}
    wrong, right = told["blocks.0.attention.query.2.weight"], told["blocks.0.attention.query.0.weight"]
    assert (wrong.is_same, wrong.style, wrong.stages) == (False, "", (0,))
    assert (right.is_same, right.style, right.reason) == (True, "colwise", "")
    assert 0.1 < wrong.relative < 2.0
    assert wrong.difference == pytest.approx(wrong.relative * wrong.size)


def test_tied_parameter_has_both_stages():
    report = check(partial(TWO, tied=True), texts(4), p=2)
    assert {p.name: p.stages for p in report.parameters}["token.weight"] == (0, 1)
