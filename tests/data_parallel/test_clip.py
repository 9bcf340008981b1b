import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.data_parallel.clip import clip_, total_norm
from tests.spmd import run_spmd

CPU = torch.device("cpu")


def norm_of_ranks(gradients):
    """The norm over all ranks, of which each counts its own list."""
    mine = [torch.tensor(values) for values in gradients[dist.get_rank()]]
    return total_norm(mine, dist.group.WORLD, CPU).item()


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        ([[[3.0]], [[2.0, 2.0], [2.0, 2.0]]], 5.0),
        ([[[3.0]], []], 3.0),  # a rank may count nothing
        ([[], []], 0.0),
    ],
)
def test_norm_is_that_of_all_gradients_together(gradients, norm):
    assert (
        run_spmd(norm_of_ranks, world_size=2, gradients=gradients) == [pytest.approx(norm, rel=1e-6)] * 2
    )  # of float32


def test_norm_of_many_small_gradients_does_not_round_away():
    tiny = [[[1e-4] * 10_000], [[1.0]]]
    assert run_spmd(norm_of_ranks, gradients=tiny) == [pytest.approx(math.sqrt(1 + 1e-4), abs=1e-9)] * 2


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])])
def test_gradients_are_scaled_down_to_the_norm_and_never_up(max_norm, expected):
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    p.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    clip_([p, nn.Parameter(torch.zeros(1))], torch.tensor(5.0, dtype=torch.float64), max_norm)
    assert p.grad.tolist() == pytest.approx(expected, abs=1e-6)  # PyTorch adds 1e-6 to the norm
