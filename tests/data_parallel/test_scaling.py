import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.data_parallel.scaling import GradientSample, check_scaled_alike
from tests.spmd import run_spmd


def with_gradients(*values):
    parameters = [nn.Parameter(torch.zeros(len(each))) for each in values]
    for parameter, each in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(each)
    return parameters


@pytest.mark.parametrize(
    ("edit", "factor"),
    [
        (lambda gradient: gradient, 1.0),
        (lambda gradient: gradient * 0.25, 0.25),
        (lambda gradient: gradient * 0, 0.0),
        (lambda gradient: gradient.clamp(-1, 1), math.nan),
        (lambda gradient: gradient + 1, math.nan),
        (lambda gradient: gradient * math.nan, math.nan),
    ],
)
def test_factor_is_told_from_other_edits(edit, factor):
    parameters = with_gradients([0.5, -2.0], [0.0, 4.0, 3.0])
    sample = GradientSample(parameters)
    for parameter in parameters:
        parameter.grad = edit(parameter.grad)
    assert sample.factor() == pytest.approx(factor, nan_ok=True)


@pytest.mark.parametrize("values", [[], [[0.0, 0.0]], [[2.0, -2.0]]], ids=["none", "zeros", "one magnitude"])
def test_nothing_is_said_of_gradients_that_cannot_tell(values):
    assert math.isnan(GradientSample(with_gradients(*values)).factor())


def scaled(factors):
    """What this rank is told when it scales by its factor; NaN stands for an edit of one element."""
    (parameter,) = with_gradients([1.0, 2.0])
    sample, factor = GradientSample([parameter]), factors[dist.get_rank()]
    parameter.grad[int(math.isnan(factor)) :] *= 3.0 if math.isnan(factor) else factor
    try:
        check_scaled_alike(sample, dist.group.WORLD, [4, 5])
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("factors", [(0.5, 0.5), (1.0, 1.0), (math.nan, 0.5)])
def test_one_factor_or_edits_of_elements_pass(factors):
    assert run_spmd(scaled, factors=factors) == [None, None]


def test_two_factors_are_refused_on_every_rank():
    told = run_spmd(scaled, factors=(0.5, 0.25))
    assert told[0] == told[1]
    assert "(rank 4 by 0.5, rank 5 by 0.25)" in told[0]
