"""Blocks that run again in backward: how often, what they keep, and that nothing else shows it."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_ptdp.recompute import choose, install
from tests.live import LiveStorages

CPU = torch.device("cpu")


class Block(nn.Module):
    """Counts its calls outside of itself, where recomputation does not set them back."""

    def __init__(self, calls):
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(4, 16), nn.Linear(16, 4), calls

    def forward(self, x):
        self.calls.add()
        return x + self.down(torch.tanh(self.up(x)))


class Counter:
    """Counts."""

    def __init__(self):
        self.count = 0

    def add(self, *_):
        """One more."""
        self.count += 1


class Net(nn.Module):
    """Six blocks."""

    def __init__(self):
        super().__init__()
        self.calls = [Counter() for _ in range(6)]
        self.blocks = nn.ModuleList(Block(counter) for counter in self.calls)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def recomputing(net, **settings):
    names = [f"blocks.{i}" for i in range(len(net.blocks))]
    return install(net, choose(net, [names], kind="full", **settings), [0], CPU, [])


@pytest.mark.parametrize(("every", "num_kept"), [(1, 6), (2, 3), (3, 2), (4, 2), (6, 1), (9, 1)])
def test_a_group_keeps_one_input_and_each_block_runs_twice(every, num_kept):
    net, x = Net(), torch.randn(8, 4)
    recomputing(net, every=every)
    with LiveStorages() as live:
        loss = net(x)
    inputs = (num_kept - 1) * x.nbytes + x.nbytes  # but for x itself, and with the output, which the loss saves
    assert live.nbytes() == inputs + loss.nbytes
    loss.backward()
    assert [counter.count for counter in net.calls] == [2] * 6


@pytest.mark.parametrize("layers", [0, 2, 5])
def test_only_the_first_blocks_run_again(layers):
    net = Net()
    recomputing(net, layers=layers)
    net(torch.randn(8, 4)).backward()
    assert [counter.count for counter in net.calls] == [2] * layers + [1] * (6 - layers)


def test_blocks_run_once_without_a_graph():
    net = Net()
    recomputing(net)
    with torch.no_grad():
        net(torch.randn(8, 4))
    assert [counter.count for counter in net.calls] == [1] * 6


@pytest.mark.parametrize("every", [1, 3])
def test_a_graph_that_is_kept_gives_its_gradients_again(every):
    net = Net()
    recomputing(net, every=every)
    loss = net(torch.randn(8, 4))
    first, second = (torch.autograd.grad(loss, list(net.parameters()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert [counter.count for counter in net.calls] == [3] * 6


def test_nothing_shows_that_a_block_recomputes():
    net, hooked = Net(), Counter()
    block = net.blocks[1]
    block.register_forward_hook(hooked.add)
    before = repr(net), list(net.state_dict()), type(block).__name__, dict(vars(block))
    installed = recomputing(net)
    assert before == (repr(net), list(net.state_dict()), type(block).__name__, dict(vars(block)))
    assert isinstance(block, Block)
    net(torch.randn(8, 4)).backward()
    assert hooked.count == 1
    installed.undo()
    assert type(block) is Block


def test_a_copy_of_a_block_runs_on_its_own_weights():
    net = Net()
    recomputing(net)
    other = copy.deepcopy(net.blocks[0])
    nn.init.zeros_(other.down.weight)
    nn.init.zeros_(other.down.bias)
    x = torch.randn(8, 4)
    assert torch.equal(other(x), x)


def test_a_forward_that_was_set_on_the_block_is_the_one_that_runs_again():
    net = Net()
    own = net.blocks[0].forward = partial(torch.mul, 3.0)
    installed = recomputing(net, layers=1)
    x = torch.randn(8, 4)
    assert torch.equal(net.blocks[0](x), 3.0 * x)
    installed.undo()
    assert net.blocks[0].forward is own


def test_an_input_that_is_edited_after_the_block_saw_it_is_an_error():
    net, x = Net(), torch.randn(8, 4)
    recomputing(net)
    loss = net(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Doubled(TorchFunctionMode):
    """Doubles what tanh returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        value = func(*args, **(kwargs or {}))
        return 2 * value if func is torch.tanh else value


def test_second_forward_runs_under_the_function_modes_of_the_first():
    plain, x = Net().double(), torch.randn(8, 4, dtype=torch.float64)
    net = copy.deepcopy(plain)
    recomputing(net)
    for each in (plain, net):
        with Doubled():
            each(x).backward()  # itself an operation, within which the mode is left
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
