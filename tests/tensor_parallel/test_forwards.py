"""Each style's split module gives the output and every gradient of the whole one."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lightning_ptdp.comm import collectives
from lightning_ptdp.tensor_parallel.convert import convert
from lightning_ptdp.tensor_parallel.placement import place
from lightning_ptdp.tensor_parallel.plan import check_plan
from tests.spmd import run_spmd, spmd

CPU = torch.device("cpu")


class Model(nn.Module):
    """What a plan is about holds its modules by name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def split_by(plan, inner):
    """This rank's part of a module, and how it was placed. plan: "" names the module itself."""
    model, size = Model(inner), dist.get_world_size()
    plan = {f"inner.{name}".rstrip("."): style for name, style in plan.items()}
    placement, faults = place(model, plan, size)
    faults += check_plan(model, plan, is_given=True)
    assert not faults, faults
    convert(model, placement, dist.group.WORLD, CPU)
    return placement


def built(make):
    torch.manual_seed(1)
    return make().double()


def differentiated(output, module, inputs):
    """Weight gradients by name, and input gradients, of a sum in which every element counts differently."""
    (output * torch.arange(1.0, 1 + output.numel(), dtype=torch.float64).cos().view(output.shape)).sum().backward()
    named = {name: p.grad for name, p in module.named_parameters()}
    return named | {f"input {i}": x.grad for i, x in enumerate(inputs) if x.is_floating_point()}


def same_as_whole(make, plan, *inputs, call=None):
    """Output, input gradients and weight gradients of the split module are the whole one's.

    call: runs the module on inputs, if not as it stands.
    """
    runs = []
    for is_split in (False, True):
        module = built(make)
        placement = split_by(plan, module) if is_split else None
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        output = call(module, *given) if call is not None else module(*given)
        found = differentiated(output, module, given)
        if placement is not None:
            for name in sorted(placement.summed):
                dist.all_reduce(found[name.removeprefix("inner.")])
            found = {name: joined(value, placement.shards.get(f"inner.{name}")) for name, value in found.items()}
        runs.append((output.detach(), found))
    (expected, gradients), (mine, found) = runs
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    assert found.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-12, msg=lambda text, at=name: f"gradient of {at}: {text}"
        )


def joined(local, shard):
    """The whole of what each rank holds a shard of; else the same, which every rank must hold."""
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, local)
    if shard is not None:
        return shard.join(held)
    assert all(torch.equal(other, held[0]) for other in held), "copies differ between ranks"
    return held[0]


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Pair(nn.Module):
    """Two linears with a function between them."""

    def __init__(self, width=6, *, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(4, width, bias=bias), nn.Linear(width, 4, bias=bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class GatedPair(nn.Module):
    """Gate and up in one matrix, in halves."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(4, 12), nn.Linear(6, 4)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Conv1D(nn.Module):
    """A linear layer with its weight as [in, out], as GPT-2's."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class PackedAttention(nn.Module):
    """Query, key and value in one transposed matrix, split by a width that the module remembers."""

    def __init__(self, num_heads=2, head_size=2):
        super().__init__()
        self.num_heads, self.head_size, self.split_size = num_heads, head_size, num_heads * head_size
        self.qkv, self.project = Conv1D(3 * self.split_size, 4), Conv1D(4, self.split_size)

    def forward(self, x):
        heads = [
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in self.qkv(x).split(self.split_size, dim=2)
        ]
        return self.project(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class SeparateAttention(nn.Module):
    """Query, key and value of one input; a norm on each head, if asked."""

    def __init__(self, *, head_norm=False):
        super().__init__()
        self.head_size = 2
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.head_norm = nn.RMSNorm(2) if head_norm else nn.Identity()

    def forward(self, x):
        q, k, v = (
            self.head_norm(f(x).unflatten(-1, (-1, self.head_size))).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


QKV = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


class ScaledEmbedding(nn.Embedding):
    """Multiplies what it finds, as some models' embeddings do."""

    def forward(self, ids):
        return super().forward(ids) * 3.0


class Experts(nn.Module):
    """Two experts as 3-D parameters, gate and up in one; each row goes to both by its routing weights."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 12, 4))
        self.down_proj = nn.Parameter(torch.randn(2, 4, 6))

    def forward(self, hidden, routing):
        total = torch.zeros_like(hidden)
        for i in range(2):
            gate, up = F.linear(hidden, self.gate_up_proj[i]).chunk(2, dim=-1)
            total = total + F.linear(F.silu(gate) * up, self.down_proj[i]) * routing[..., i : i + 1]
        return total


EXPERTS = {"": "moe_tp_experts", "gate_up_proj": "packed_colwise", "down_proj": "rowwise"}


def linear():
    return nn.Linear(4, 7)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_colwise_then_rowwise(size):
    run_spmd(check_pairs, world_size=size)


def check_pairs():
    plan = {"up": "colwise", "down": "rowwise"}
    same_as_whole(lambda: Pair(8), plan, random(2, 3, 4))
    same_as_whole(lambda: Pair(7), plan, random(2, 3, 4))
    same_as_whole(lambda: Pair(7, bias=False), plan, random(3, 4))


@pytest.mark.parametrize("size", [2, 3])
def test_colwise_gather_output(size):
    run_spmd(check_gathered, world_size=size)


def check_gathered():
    same_as_whole(linear, {"": "colwise_gather_output"}, random(2, 3, 4))
    same_as_whole(lambda: Conv1D(7, 4), {"": "colwise_gather_output"}, random(2, 3, 4))


@pytest.mark.parametrize("size", [2, 4])
def test_rowwise_that_splits_its_input(size):
    run_spmd(check_split_input, world_size=size)


def check_split_input():
    same_as_whole(lambda: nn.Linear(7, 4), {"": "rowwise_split_input"}, random(2, 3, 7))
    same_as_whole(lambda: Conv1D(4, 7), {"": "rowwise_split_input"}, random(2, 3, 7))


@pytest.mark.parametrize("down", ["rowwise", "packed_rowwise"])
@spmd(world_size=2)
def test_packed_gate_and_up(down):
    if down == "rowwise":
        same_as_whole(GatedPair, {"gate_up": "packed_colwise", "down": "rowwise"}, random(2, 3, 4))
    else:
        plan = {"up": "packed_colwise", "down": "packed_rowwise"}
        same_as_whole(lambda: Pair(8), plan, random(2, 3, 4))


@spmd(world_size=3)
def test_packed_gate_and_up_that_no_peers_divide():
    same_as_whole(lambda: Pair(10), {"up": "packed_colwise", "down": "packed_rowwise"}, random(2, 3, 4))


@spmd(world_size=2)
def test_packed_query_key_and_value_with_a_local_size():
    plan = {"qkv": "packed_qkv_colwise", "split_size": "local_size", "project": "rowwise"}
    same_as_whole(PackedAttention, plan, random(2, 3, 4))


@spmd(world_size=2)
def test_separate_query_key_and_value():
    same_as_whole(SeparateAttention, QKV, random(2, 3, 4))


@spmd(world_size=2)
def test_norm_of_heads_with_a_summed_gradient():
    plan = QKV | {"head_norm": "replicated_with_grad_allreduce"}
    same_as_whole(lambda: SeparateAttention(head_norm=True), plan, random(2, 3, 4))


IDS = torch.tensor([[0, 6, 3], [4, 2, 6]])


@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
@pytest.mark.parametrize("size", [2, 3])
def test_embedding(style, size):
    run_spmd(check_embeddings, world_size=size, style=style)


def check_embeddings(style):
    same_as_whole(lambda: nn.Embedding(7, 5), {"": style}, IDS)
    same_as_whole(lambda: ScaledEmbedding(7, 5), {"": style}, IDS)
    for padding in (0, 3, 6):
        same_as_whole(lambda at=padding: nn.Embedding(7, 5, padding_idx=at), {"": style}, IDS)


@pytest.mark.parametrize("bad", [7, -1])
@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
@spmd(world_size=2)
def test_index_outside_the_vocabulary_is_refused_on_every_peer(style, bad):
    module = built(lambda: nn.Embedding(7, 4))
    split_by({"": style}, module)
    with pytest.raises(IndexError):
        module(torch.tensor([0, bad]))
    if style == "embedding_rowwise":
        with pytest.raises(IndexError, match=rf"of 7 rows was asked for indices \[{bad}\]"):
            module(torch.tensor([0, bad]))


@pytest.mark.parametrize("size", [2, 3])
def test_experts(size):
    run_spmd(check_experts, world_size=size)


def check_experts():
    same_as_whole(Experts, EXPERTS, random(3, 4), random(3, 2).softmax(-1))
    same_as_whole(
        Experts,
        EXPERTS,
        random(3, 4),
        random(3, 2).softmax(-1),
        call=lambda module, hidden, routing: module(hidden, routing=routing),
    )


class SummedLater(nn.Module):
    """Partial outputs, added up at the end by whoever calls."""

    def __init__(self):
        super().__init__()
        self.weight_in, self.weight_out = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))
        self.idle = nn.Identity()

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.weight_in)), self.weight_out) + self.idle(x)


@spmd(world_size=2)
def test_identity_expert_gives_its_share_of_a_sum():
    plan = {"": "moe_tp_experts", "weight_in": "colwise", "weight_out": "rowwise", "idle": "moe_identity_expert"}
    same_as_whole(SummedLater, plan, random(3, 4))


class Summed(nn.Module):
    """Columns of bare parameters, whose partial product is summed."""

    def __init__(self):
        super().__init__()
        self.up, self.inner = nn.Linear(4, 6), BareRow()

    def forward(self, x):
        return self.inner(torch.tanh(self.up(x)))


class BareRow(nn.Module):
    """A product with a bare parameter."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return x @ self.matrix


@spmd(world_size=2)
def test_outputs_of_bare_split_parameters_are_summed():
    """[in, out], so that its input dim is cut by the style that cuts the output dim of a linear."""
    same_as_whole(Summed, {"up": "colwise", "inner": "all_reduce", "inner.matrix": "colwise"}, random(3, 4))


class LatentAttention(nn.Module):
    """Compressed keys go through a split projection; their rotary part goes straight to every head."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(qk_rope_head_dim=2)
        self.kv_a = nn.Linear(4, 3 + 2)
        self.kv_b, self.o = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x):
        latent, rotary = self.kv_a(x).split([3, 2], dim=-1)
        heads = self.kv_b(latent).unflatten(-1, (-1, 2)) * torch.tanh(rotary)[..., None, :]
        return self.o(heads.flatten(-2))


@spmd(world_size=2)
def test_rotary_part_of_latent_keys():
    same_as_whole(LatentAttention, {"kv_a": "mla_kv_a_proj", "kv_b": "colwise", "o": "rowwise"}, random(2, 3, 4))


@contextmanager
def all_reduces_counted():
    """The shapes of what is all-reduced meanwhile."""
    shapes, all_reduce = [], dist.all_reduce
    with patch.object(
        collectives.dist,
        "all_reduce",
        lambda tensor, *args, **kwargs: shapes.append(tuple(tensor.shape)) or all_reduce(tensor, *args, **kwargs),
    ):
        yield shapes


@spmd(world_size=2)
def test_projections_of_one_input_share_an_all_reduce():
    module = built(SeparateAttention)
    split_by(QKV, module)
    x = random(2, 3, 4).requires_grad_()
    with all_reduces_counted() as in_forward:
        output = module(x)
    with all_reduces_counted() as in_backward:
        output.sum().backward()
    assert in_forward == [(2, 3, 4)], "the output of the row-parallel projection"
    assert in_backward == [(2, 3, 4)], "the gradient of the input, once for query, key and value"


@spmd(world_size=2)
def test_projections_of_inputs_edited_in_between_stay_apart():
    class Editing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.o = nn.Linear(4, 4)

        def forward(self, x):
            x = x * 1
            first = self.a(x.detach()) + self.a(x)
            y = x.clone()
            y += 1
            return self.o(first * self.b(y))

    same_as_whole(Editing, {"a": "colwise", "b": "colwise", "o": "rowwise"}, random(2, 3, 4))


@spmd(world_size=2)
def test_input_used_without_gradients_first_still_gets_its_gradient():
    def call(module, x):
        with torch.no_grad():
            module.up(x)
        return module(x)

    same_as_whole(Pair, {"up": "colwise", "down": "rowwise"}, random(2, 3, 4), call=call)


@spmd(world_size=2)
def test_frozen_weights_pass_the_gradient_on():
    runs = []
    for is_split in (False, True):
        module = built(Pair).requires_grad_(False)
        if is_split:
            split_by({"up": "colwise", "down": "rowwise"}, module)
        x = random(2, 4).requires_grad_()
        module(x).square().sum().backward()
        runs.append(x.grad)
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("style", ["colwise_gather_output", "embedding_colwise", "embedding_rowwise"])
@spmd(world_size=2)
def test_output_may_be_edited_and_viewed(style):
    make = linear if style == "colwise_gather_output" else lambda: nn.Embedding(7, 4)
    same_as_whole(
        make,
        {"": style},
        random(2, 3, 4) if style == "colwise_gather_output" else IDS,
        call=lambda module, x: module(x).mul_(2).view(2, -1),
    )
