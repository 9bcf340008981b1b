"""Logits split over the vocabulary give the results and gradients of plain ones, and stay split where they can."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lightning_ptdp.engine.loss_weight import TargetCounter, weigh
from lightning_ptdp.tensor_parallel import logits as logits_module
from lightning_ptdp.tensor_parallel.logits import SplitLogits, join_all
from lightning_ptdp.tensor_parallel.shard import Shard
from tests.spmd import spmd

B, S, V = 2, 3, 5  # peers hold 3 and 2 classes
LABELS = torch.tensor([[0, 4, 2], [3, -100, 1]])
MASK = torch.tensor([[True, False, True], [False, True, True]])


def random_logits():
    return torch.randn(B, S, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(2)


def split(whole):
    """The split logits of a whole, and the shard that its gradient reaches."""
    local = Shard(whole.ndim - 1, (whole.shape[-1],)).cut(whole, dist.get_rank(), 2).requires_grad_()
    return SplitLogits.make(local * 1, dist.group.WORLD, -1, whole.shape[-1]), local


def gradient_by(result, leaf):
    """Of a sum of the result in which every element counts differently."""
    weights = torch.arange(1.0, 1 + result.numel(), dtype=torch.float64).sin().view(result.shape)
    (result.double() * weights).sum().backward()
    return leaf.grad


def same_as_plain(operation):
    """Run `operation` on split and on plain logits; returns what it gave of the split ones."""
    whole = random_logits().requires_grad_()
    expected = operation(whole * 1)
    mine, local = split(random_logits())
    found = operation(mine)
    joined = found.join() if isinstance(found, SplitLogits) else found
    assert found.shape == expected.shape, f"{found.shape} where plain gives {expected.shape}"
    assert found.dtype == expected.dtype, f"{found.dtype} where plain gives {expected.dtype}"
    torch.testing.assert_close(joined, expected, rtol=0, atol=1e-12)
    if expected.requires_grad:
        gradient = Shard(2, (V,)).cut(gradient_by(expected, whole), dist.get_rank(), 2)
        torch.testing.assert_close(gradient_by(joined, local), gradient, rtol=0, atol=1e-12)
    return found


KEEP_IT_SPLIT = {
    "to": lambda x: x.to(torch.float32).double(),
    "float": lambda x: x.float(),
    "bfloat16": lambda x: x.bfloat16(),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "view(-1, V)": lambda x: x.view(-1, V),
    "view(-1, size(-1))": lambda x: x.view(-1, x.size(-1)),
    "reshape": lambda x: torch.reshape(x, (S * B, V)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten by keyword": lambda x: x.flatten(end_dim=1),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (S, B)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x[:1].squeeze(0),
    "[..., :-1, :]": lambda x: x[..., :-1, :],
    "[:, :-1]": lambda x: x[:, :-1],
    "[:, 1:]": lambda x: x[:, 1:],
    "[:, 1:].contiguous().view(-1, V)": lambda x: x[:, 1:].contiguous().view(-1, V),
    "[0]": lambda x: x[0],
    "[:, -1]": lambda x: x[:, -1],
    "[:, None]": lambda x: x[:, None],
    "[mask]": lambda x: x[MASK],
    "[list]": lambda x: x[:, [2, 0]],
    "[tensors]": lambda x: x[torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2])],
    "flattened [mask]": lambda x: x.view(-1, V)[MASK.view(-1)],
    "transpose": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(0, 2, 1),
    "movedim": lambda x: torch.movedim(x, -1, 1),
    "transposed twice": lambda x: x.transpose(1, 2).transpose(1, 2)[:, 1:],
    "softcap": lambda x: 3.0 * torch.tanh(x / 3.0),
    "softcap, by methods": lambda x: x.div(3.0).tanh().mul(3.0),
    "scaling": lambda x: x * 0.5,
    "scaling by a tensor of no dim": lambda x: x * torch.tensor(0.5, dtype=torch.float64),
    "scaling from the left": lambda x: 0.5 * x,
    "temperature": lambda x: x / 0.7,
    "adding a number": lambda x: x + 1,
    "subtracting from a number": lambda x: 1 - x,
    "negation": lambda x: -x,
    "clamp": lambda x: x.clamp(-1, 1),
    "power": lambda x: x**2,
    "exp": lambda x: x.exp(),
}


@pytest.mark.parametrize("name", KEEP_IT_SPLIT)
@spmd(world_size=2)
def test_stays_split(name):
    found = same_as_plain(KEEP_IT_SPLIT[name])
    assert isinstance(found, SplitLogits), f"{type(found)} after {name}"


def cross_entropy(x, **options):
    return F.cross_entropy(x.view(-1, V), LABELS.view(-1), **options)


STAY_APART = {
    "plain": cross_entropy,
    "of float64": lambda x: cross_entropy(x.to(torch.float64)),
    "shifted": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), LABELS[..., 1:].reshape(-1)),
    "class dim 1": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "class dim 1, permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), LABELS, reduction="none"),
    "of one row": lambda x: F.cross_entropy(x[0, 0], LABELS[0, 0]),
    "of masked rows": lambda x: F.cross_entropy(x[MASK], LABELS[MASK]),
    "sum": lambda x: cross_entropy(x, reduction="sum"),
    "none": lambda x: cross_entropy(x, reduction="none"),
    "ignore_index": lambda x: cross_entropy(x, ignore_index=-100),
    "label_smoothing": lambda x: cross_entropy(x, label_smoothing=0.2),
    "by keyword": lambda x: F.cross_entropy(input=x.view(-1, V), target=LABELS.view(-1)),
    "of softcapped": lambda x: cross_entropy(2 * torch.tanh(x / 2)),
    "by the module": lambda x: torch.nn.CrossEntropyLoss()(x.view(-1, V), LABELS.view(-1)),
}


@pytest.mark.parametrize("name", STAY_APART)
@spmd(world_size=2)
def test_cross_entropy_runs_on_the_shards(name):
    with joins_counted() as joins:
        found = same_as_plain(STAY_APART[name])
    assert not joins, "the logits were joined"
    assert type(found) is torch.Tensor, type(found)


@contextmanager
def joins_counted():
    """A list that grows with every message that joins logits."""
    calls, gather = [], logits_module.gather_from
    with patch.object(logits_module, "gather_from", lambda *args: calls.append(args[2:]) or gather(*args)):
        yield calls


TARGET_PROBABILITIES = torch.rand(B * S, V, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(-1)
CLASS_WEIGHTS = torch.arange(1.0, 1 + V, dtype=torch.float64)

JOIN = {
    "softmax": lambda x: x.softmax(-1),
    "softmax, by function": lambda x: F.softmax(x, dim=-1),
    "log_softmax and nll_loss": lambda x: F.nll_loss(F.log_softmax(x.view(-1, V), dim=-1), LABELS.view(-1)),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(2, dim=-1).values,
    "max": lambda x: x.max(-1).values,
    "sum": lambda x: x.sum(),
    "mean over the vocabulary": lambda x: x.mean(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "[..., 0]": lambda x: x[..., 0],
    "[..., :3]": lambda x: x[..., :3],
    "[:, :, classes]": lambda x: x[:, :, [4, 0]],
    "gather": lambda x: x.gather(-1, LABELS.clamp(min=0)[..., None]),
    "matmul": lambda x: x @ torch.eye(V, dtype=torch.float64).flip(0),
    "as the right operand": lambda x: torch.ones(B, 1, S, dtype=torch.float64) @ x,
    "stack": lambda x: torch.stack([x, x * 2]),
    "cat": lambda x: torch.cat([x, x], dim=1),
    "sum of two": lambda x: x + x,
    "product with an array": lambda x: x * CLASS_WEIGHTS,
    "an array and it": lambda x: CLASS_WEIGHTS - x,
    "where": lambda x: torch.where(MASK[..., None], x, 0.0),
    "view across the vocabulary": lambda x: x.view(B, -1),
    "flattened whole": lambda x: x.flatten(),
    "squared error": lambda x: F.mse_loss(x, torch.zeros(B, S, V, dtype=torch.float64)),
    "class weights": lambda x: cross_entropy(x, weight=CLASS_WEIGHTS),
    "target probabilities": lambda x: F.cross_entropy(x.view(-1, V), TARGET_PROBABILITIES),
    "cross_entropy over another dim": lambda x: F.cross_entropy(x, torch.zeros(B, V, dtype=torch.long)),
    "unbind": lambda x: x.unbind(1)[1],
    "chunk": lambda x: x.chunk(2, dim=-1)[0],
    "relu": torch.relu,
    "comparison": lambda x: x > 0,
    "einsum": lambda x: torch.einsum("bsv,v->bs", x, CLASS_WEIGHTS),
}


@pytest.mark.parametrize("name", JOIN)
@spmd(world_size=2)
def test_is_joined_for_anything_else(name):
    found = same_as_plain(JOIN[name])
    assert type(found) is torch.Tensor, f"{type(found)} after {name}"


def masked(x):
    x[:, :, 0] = -1.0
    return x


def filled(x):
    x.masked_fill_(MASK[..., None], -2.0)
    return x


def scaled(x):
    x *= 2
    return x


def divided(x):
    x.div_(2.0)
    return x


EDITS = {"x[...] = ": masked, "masked_fill_": filled, "*=": scaled, "div_": divided}


@pytest.mark.parametrize("name", EDITS)
@spmd(world_size=2)
def test_edit_makes_it_the_joined_logits_for_good(name):
    def edited_then_used(x):
        x = EDITS[name](x)
        again = x.view(-1, V) * 1.5  # what else stays split
        return torch.stack([cross_entropy(x), again.sum(), x[:, 1:].sum()])

    same_as_plain(edited_then_used)


@spmd(world_size=2)
def test_edit_of_a_view_reaches_the_logits():
    def edited_through_a_view(x):
        x.view(-1, V)[:, 0] = -1.0
        return cross_entropy(x)

    same_as_plain(edited_through_a_view)


@spmd(world_size=2)
def test_edit_of_detached_logits_is_right():
    def edit(x):
        y = x.detach().clone()
        y[..., 1] = 7.0
        return y.argmax(-1)

    assert same_as_plain(edit).eq(1).any()


@spmd(world_size=2)
def test_metadata_is_that_of_the_whole_and_needs_no_message():
    x, local = split(random_logits())
    with joins_counted() as joins:
        assert x.shape == (B, S, V)
        assert (x.size(-1), x.dim(), x.ndim, len(x), x.numel()) == (V, 3, 3, B, B * S * V)
        assert (x.dtype, x.device, x.is_floating_point(), x.is_cuda) == (torch.float64, local.device, True, False)
        assert x.requires_grad
        assert x.grad_fn is not None
        assert not x.detach().requires_grad
        assert not SplitLogits.make(local.detach(), dist.group.WORLD, -1, V).requires_grad
        assert isinstance(x, torch.Tensor)
        assert x.vocabulary == V
    assert not joins, joins


@spmd(world_size=2)
def test_its_text_needs_no_peer():
    x, _ = split(random_logits())
    if dist.get_rank() == 0:  # the other rank would have to join in
        assert repr(x) == "SplitLogits(shape=(2, 3, 5), vocabulary_dim=2)"
        assert f"{x}" == repr(x) == str(x)


@spmd(world_size=2)
def test_step_results_are_joined_and_detached():
    whole = random_logits()
    x, _ = split(whole)
    found = join_all({"loss": 1.0, "logits": [x, whole]})
    torch.testing.assert_close(found["logits"][0], whole, rtol=0, atol=0)
    assert type(found["logits"][0]) is torch.Tensor
    assert not found["logits"][0].requires_grad
    assert found["logits"][1] is whole


@spmd(world_size=2)
def test_logits_are_gathered_once():
    x, _ = split(random_logits())
    with joins_counted() as joins:
        x.argmax(-1)
        x.softmax(-1)
    assert len(joins) == 1


COUNTED = {
    "flat": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1)),
    "class dim 1": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "by keyword": lambda x: F.cross_entropy(input=x.view(-1, V), target=LABELS.view(-1)),
    "by the module": lambda x: torch.nn.CrossEntropyLoss()(x.view(-1, V), LABELS.view(-1)),
    "class weights": lambda x: cross_entropy(x, weight=torch.ones(V, dtype=torch.float64)),
    "log_softmax and nll_loss": lambda x: F.nll_loss(F.log_softmax(x.view(-1, V), dim=-1), LABELS.view(-1)),
}


@pytest.mark.parametrize("name", COUNTED)
@spmd(world_size=2)
def test_real_targets_of_its_loss_are_counted_once(name):
    x, _ = split(random_logits())
    counter = TargetCounter()
    counter.start()
    try:
        loss = COUNTED[name](x)
    finally:
        counter.stop()
    assert float(weigh(loss, counter.calls, B).value) == 5.0  # of six, one is ignored
