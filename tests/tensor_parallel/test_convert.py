"""What stays of a module whose parts are split."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.tensor_parallel.convert import convert
from lightning_ptdp.tensor_parallel.placement import place
from tests.models import GPT, texts
from tests.spmd import spmd
from tests.trainer.test_layouts import PLAN

CPU = torch.device("cpu")


def converted(module, plan=PLAN):
    placement, faults = place(module, plan, 2)
    assert not faults, faults
    convert(module, placement, dist.group.WORLD, CPU)
    return placement


@spmd(world_size=2)
def test_names_classes_and_parameters_stay():
    module = GPT(num_layers=1, tied=True)
    names, parameters = list(module.state_dict()), list(module.parameters())
    kinds = [(name, type(child).__name__, type(child).__module__) for name, child in module.named_modules()]
    converted(module)
    assert list(module.state_dict()) == names
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert [(n, type(c).__name__, type(c).__module__) for n, c in module.named_modules()] == kinds
    assert isinstance(module.token, nn.Embedding)
    assert isinstance(module.blocks[0].up, nn.Linear)
    assert module.head.weight is module.token.weight
    assert module.token.weight.shape == (32, 32), "cut once, under two names"


@spmd(world_size=2)
def test_second_conversion_does_nothing():
    module = GPT(num_layers=1)
    converted(module)
    kinds = [type(child) for child in module.modules()]
    weights = copy.deepcopy(module.state_dict())
    placement, _ = place(GPT(num_layers=1), PLAN, 2)
    convert(module, placement, dist.group.WORLD, CPU)
    assert [type(child) for child in module.modules()] == kinds
    assert all(torch.equal(module.state_dict()[name], value) for name, value in weights.items())


@spmd(world_size=2)
def test_modules_without_parameters_here_are_left_alone():
    module = GPT(num_layers=2)
    placement, _ = place(module, PLAN, 2)
    for child in module.blocks[1].modules():
        child._parameters.clear()
    convert(module, placement, dist.group.WORLD, CPU)
    assert type(module.blocks[1].up) is nn.Linear
    assert type(module.blocks[0].up) is not nn.Linear


@spmd(world_size=2)
def test_evaluation_gives_plain_logits():
    torch.manual_seed(1)
    module = GPT(num_layers=1, vocabulary=61).double()
    ids = texts(2, vocabulary=61)["ids"]
    expected = module(ids)
    converted(module)
    with torch.no_grad():
        found = module(ids)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
    assert type(module(ids)).__name__ == "SplitLogits"
    torch.testing.assert_close(module(ids).join(), expected, rtol=0, atol=1e-12)


@spmd(world_size=2)
def test_forward_set_on_a_module_is_kept():
    torch.manual_seed(1)
    module = GPT(num_layers=1).double()
    own = module.token.forward
    module.token.forward = lambda ids: own(ids) * 2
    ids = texts(2)["ids"]
    with torch.no_grad():
        expected = module(ids)
        converted(module)
        torch.testing.assert_close(module(ids), expected, rtol=0, atol=1e-12)
