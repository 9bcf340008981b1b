"""Attention scores that are computed again in backward, however attention is written."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp import kernels
from lightning_ptdp.recompute import choose, install
from tests.live import LiveStorages

CPU = torch.device("cpu")
B, S, H, A = 2, 48, 16, 4


def masked(scores):
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~allowed, -math.inf)


def written_out(q, k, v):
    weights = F.dropout((masked(q @ k.transpose(-1, -2)) / 2).softmax(-1), 0.1)
    return weights @ v


def as_transformers_do(q, k, v):
    mask = torch.zeros(1, 1, S, S).masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -math.inf)
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=True), v).transpose(1, 2).contiguous().transpose(1, 2)


def with_a_bias(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    bias = torch.arange(S, dtype=q.dtype).expand(B * A, 1, S)
    scores = bias.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.5)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (B, A))


def by_einsum_and_in_place(q, k, v):
    scores = torch.einsum("baid,bajd->baij", q, k)
    scores /= 2
    scores[..., -1] = 0.0
    return torch.einsum("baij,bajd->baid", scores.softmax(-1), v)


def by_hand(q, k, v):
    scores = q @ k.mT
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def of_two_products(q, k, v):
    one, other = (q.roll(i, 1) @ k.roll(i, 1).mT for i in (0, 1))
    return (one.softmax(-1) - 0.5 * other.softmax(-1)) @ v


def by_our_kernel(q, k, v):
    return kernels.scaled_causal_softmax(q @ k.mT, 0.5) @ v


def in_pytorch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


WITH_SCORES = (
    written_out,
    as_transformers_do,
    with_a_bias,
    by_einsum_and_in_place,
    by_hand,
    of_two_products,
    by_our_kernel,
    in_pytorch,
)


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def without_softmax(q, k, v):
    return F.gelu(q @ k.mT) @ v


class Block(nn.Module):
    """Attention of some kind. num_linear: calls of its linear layers."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.num_linear = mix, 0
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        for linear in (self.qkv, self.out):
            linear.register_forward_hook(self.count)

    def count(self, *_):
        self.num_linear += 1

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (A, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Packaged(nn.Module):
    """PyTorch's own module, which returns its weights."""

    num_linear = 2

    def __init__(self, _):
        super().__init__()
        self.attention = nn.MultiheadAttention(H, A, dropout=0.1, batch_first=True)

    def forward(self, x):
        mixed, weights = self.attention(x, x, x)
        return x + mixed * weights.detach().mean()


class Net(nn.Module):
    """Two blocks."""

    def __init__(self, kind, mix):
        super().__init__()
        self.blocks = nn.ModuleList(kind(mix) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def run(kind, mix, *, selective, dtype=torch.float32, autocast=False):
    """Loss and gradients, the largest tensor that lived on, how often linear layers ran, the next draw, the remark."""
    torch.manual_seed(0)
    net = Net(kind, mix).to(dtype)
    names = [["blocks.0", "blocks.1"]]
    installed = install(net, choose(net, names, kind="selective"), [0], CPU, []) if selective else None
    x = torch.randn(B, S, H, dtype=dtype)
    with LiveStorages() as live, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net(x)
    largest, drawn = live.largest(), torch.rand(3)
    loss.backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    remark = installed.remark() if installed is not None else None
    return [loss.detach(), *gradients, drawn], largest, [block.num_linear for block in net.blocks], remark


KINDS = [(Block, mix) for mix in WITH_SCORES] + [(Packaged, None)]


@pytest.mark.parametrize("settings", [{}, {"dtype": torch.float64}, {"autocast": True}], ids=str)
@pytest.mark.parametrize(("kind", "mix"), KINDS, ids=[mix.__name__ if mix else kind.__name__ for kind, mix in KINDS])
def test_scores_are_computed_again_with_the_same_bits(kind, mix, settings):
    plain, most, _, _ = run(kind, mix, selective=False, **settings)
    again, left, num_linear, remark = run(kind, mix, selective=True, **settings)
    assert all(map(torch.equal, plain, again))
    assert most >= B * A * S * S
    assert left < B * A * S * S, "elements of the largest tensor that waits for backward"
    assert num_linear == [2, 2]
    assert remark is None


@pytest.mark.parametrize("mix", [fused, without_softmax])
def test_where_there_are_no_scores_nothing_changes_and_the_user_is_told(mix):
    plain, most, _, _ = run(Block, mix, selective=False)
    again, left, _, remark = run(Block, mix, selective=True)
    assert all(map(torch.equal, plain, again))
    assert left == most
    assert remark.startswith("recompute='selective' has nothing to recompute: no block keeps attention scores")


def test_a_mask_that_is_edited_before_backward_is_an_error():
    mask = torch.zeros(S, S)
    net = Net(Block, lambda q, k, v: (q @ k.mT + mask).softmax(-1) @ v)
    install(net, choose(net, [["blocks.0", "blocks.1"]], kind="selective"), [0], CPU, [])
    loss = net(torch.randn(B, S, H))
    mask.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"one of shape \(48, 48\) was edited in place"):
        loss.backward()


def test_what_autograd_would_refuse_is_refused():
    def edits(q, k, v):
        y = v.exp()
        kept = y * y
        y.add_(1)
        return written_out(q, k, kept)

    net = Net(Block, edits)
    install(net, choose(net, [["blocks.0", "blocks.1"]], kind="selective"), [0], CPU, [])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(torch.randn(B, S, H)).backward()


class Cored(nn.Module):
    """A block with a module of the name that Megatron-LM uses."""

    def __init__(self):
        super().__init__()
        self.linear, self.core_attention, self.other = nn.Linear(H, H), nn.Dropout(0.1), nn.Tanh()

    def forward(self, x):
        return self.linear(self.other(self.core_attention(x)))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [((), ["blocks.0.core_attention"]), (("blocks.*.other", "blocks.*.core_*"), ["core_attention", "other"])],
)
def test_named_modules_are_those_that_run_again(patterns, expected):
    net, ran = Net(lambda _: Cored(), None), []
    found = choose(net, [["blocks.0", "blocks.1"]], kind="selective", layers=1, patterns=patterns)
    install(net, found, [0], CPU, [])
    for name, module in net.blocks[0].named_children():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    assert [name.removeprefix("blocks.0.") for name in found.modules] == [e.removeprefix("blocks.0.") for e in expected]
    net(torch.randn(B, S, H)).backward()
    assert ran == ["core_attention", "other", "linear"]
