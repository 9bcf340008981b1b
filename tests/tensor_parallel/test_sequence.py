"""Blocks on parts of the sequence give the outputs and gradients of whole ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.tensor_parallel.convert import convert
from lightning_ptdp.tensor_parallel.placement import place, with_sequence
from tests.models import Block
from tests.spmd import run_spmd, spmd

CPU = torch.device("cpu")
PLAN = {
    "blocks.*.norm_1": "sequence_parallel",
    "blocks.*.norm_2": "sequence_parallel",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.project": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Stack(nn.Module):
    """Blocks one after the other; remembers the length of the sequence between them."""

    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 4, 0.0) for _ in range(num_blocks))
        self.lengths = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            self.lengths.append(x.shape[1])
        return x


def built(num_blocks, frozen=()):
    torch.manual_seed(1)
    module = Stack(num_blocks).double()
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    return module


def split(module, plan=PLAN):
    placement, faults = place(module, plan, dist.get_world_size())
    assert not faults, faults
    placement = with_sequence(module, placement, "blocks")
    convert(module, placement, dist.group.WORLD, CPU, placement.sequence_blocks)
    return placement


def run(module, x):
    """Output and gradients by name, of a sum in which every element counts differently."""
    x = x.clone().requires_grad_()
    output = module(x)
    (output * torch.arange(1.0, 1 + output.numel(), dtype=torch.float64).cos().view(output.shape)).sum().backward()
    return output.detach(), {name: p.grad for name, p in module.named_parameters()} | {"x": x.grad}


def random(length):
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def check(num_blocks, frozen=()):
    size, x = dist.get_world_size(), random(8)
    expected, gradients = run(built(num_blocks, frozen), x)
    module = built(num_blocks, frozen)
    placement = split(module)
    output, found = run(module, x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert module.lengths == [8 // size] * (num_blocks - 1) + [8], "only what the last block returns is whole"
    for name, value in gradients.items():
        mine = found[name]
        if name in frozen:
            assert mine is None
            continue
        if name in placement.summed:
            dist.all_reduce(mine)
        if (shard := placement.shards.get(name)) is not None:
            value = shard.cut(value, dist.get_rank(), size)  # noqa: PLW2901
        torch.testing.assert_close(mine, value, rtol=0, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize(("size", "num_blocks"), [(2, 1), (2, 3), (4, 2)])
def test_blocks_on_parts_of_the_sequence_equal_whole_ones(size, num_blocks):
    run_spmd(check, world_size=size, num_blocks=num_blocks)


def test_weights_that_do_not_train_need_no_whole_input_again():
    run_spmd(check, world_size=2, num_blocks=1, frozen=[f"blocks.0.{name}" for name in FROZEN])


FROZEN = ("attention.query.weight", "attention.value.weight", "attention.value.bias", "up.weight")


@spmd(world_size=2)
def test_evaluation_equals_the_whole_too():
    expected = built(2)(random(8)).detach()
    module = built(2)
    split(module)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(random(8)), expected, rtol=0, atol=1e-12)


@spmd(world_size=2)
def test_sequence_that_the_peers_do_not_divide_is_refused():
    module = built(1)
    split(module)
    with pytest.raises(ValueError, match="must be a multiple of tensor_parallel_size") as caught:
        module(random(5))
    assert "got activations (2, 5, 8), tensor_parallel_size=2" in str(caught.value)
    assert "pad the sequences, or use sequence_parallel=False" in str(caught.value)
    module(random(6))  # and nothing is left of it


@spmd(world_size=2)
def test_split_layer_that_is_fed_a_part_of_the_sequence_is_refused():
    module = built(1)
    split(module, {name: style for name, style in PLAN.items() if name != "blocks.*.norm_2"})
    with pytest.raises(ValueError, match="a column-parallel Linear was given") as caught:
        module(random(8))
    assert "(2, 4, 8), a part of the sequence (of 8)" in str(caught.value)
    assert 'give the norm before it the style "sequence_parallel"' in str(caught.value)


@spmd(world_size=2)
def test_peers_draw_alike_after_a_block_in_which_they_drew_apart():
    module = built(1)
    split(module)
    masks = []
    module.blocks[0].dropout.register_forward_hook(lambda *_: masks.append(torch.rand(())))
    torch.manual_seed(5)
    module(random(8))
    mine = torch.stack([masks[0], masks[1], torch.rand(())])
    seen = [torch.empty(3) for _ in range(2)]
    dist.all_gather(seen, mine)
    assert (seen[0] == seen[1]).tolist() == [False, False, True]
