"""The loss on vocabulary shards against `F.cross_entropy` on the whole."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from lightning_ptdp.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
from lightning_ptdp.tensor_parallel.shard import Shard
from tests.spmd import run_spmd, spmd

VOCABULARY = 61  # no size of a group divides it
ROWS = 7
REDUCTIONS = ("mean", "sum", "none")


def random_logits(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return (3 * torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)


def random_targets(ignored=(), ignore_index=-100):
    """The first and the last class are among them, and the borders of shards."""
    targets = torch.tensor([0, 60, 15, 16, 31, 47, 48])
    targets[list(ignored)] = ignore_index
    return targets


def split_loss(whole, targets, **options):
    """The loss of this rank, and the gradient of its shard."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shard = Shard(1, (VOCABULARY,))
    local = shard.cut(whole, rank, size).requires_grad_()
    first = shard.pieces(rank, size)[0].start
    loss = vocabulary_parallel_cross_entropy(
        local, targets, dist.group.WORLD, first=first, vocabulary=VOCABULARY, **options
    )
    row_weights = torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)
    (loss * row_weights).sum().backward()
    return loss.detach(), shard.cut(reference(whole, targets, **options)[1], rank, size), local.grad


def reference(whole, targets, **options):
    whole = whole.detach().clone().requires_grad_()
    loss = F.cross_entropy(whole, targets, **options)
    row_weights = torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)
    (loss * row_weights).sum().backward()
    return loss.detach(), whole.grad


def same_as_whole(whole, targets, **options):
    loss, expected_gradient, gradient = split_loss(whole, targets, **options)
    torch.testing.assert_close(loss, reference(whole, targets, **options)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


def every_option():
    whole = random_logits()
    for reduction in REDUCTIONS:
        for smoothing in (0.0, 0.1):
            for ignored, ignore_index in [((), -100), ((0, 3), -100), ((1, 5, 6), -1), ((2,), 7)]:
                same_as_whole(
                    whole,
                    random_targets(ignored, ignore_index),
                    reduction=reduction,
                    label_smoothing=smoothing,
                    ignore_index=ignore_index,
                )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradient_are_those_of_the_whole(size):
    run_spmd(every_option, world_size=size)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@spmd(world_size=2)
def test_rows_that_are_all_ignored_cost_nothing_and_have_no_gradient(reduction):
    loss, _, gradient = split_loss(random_logits(), random_targets(range(ROWS)), reduction=reduction)
    assert not loss.any(), loss
    assert not gradient.any(), gradient


@spmd(world_size=2)
def test_mean_of_nothing_is_nan_and_its_gradient_no_nan():
    loss, _, gradient = split_loss(random_logits(), random_targets(range(ROWS)))
    assert loss.isnan(), "as F.cross_entropy says"
    assert torch.equal(gradient, torch.zeros_like(gradient)), gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@spmd(world_size=2)
def test_16_bit_logits_are_computed_in_float32(dtype):
    whole, targets = random_logits(dtype), random_targets()
    loss, _, gradient = split_loss(whole, targets)
    expected, expected_gradient = reference(whole.double(), targets)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)  # 61 terms in float32
    local = Shard(1, (VOCABULARY,)).cut(expected_gradient, dist.get_rank(), 2)
    # rounded once, from float32, so by half a unit in the last place
    torch.testing.assert_close(gradient.double(), local, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("at", [0, 60])
@spmd(world_size=2)
def test_extreme_logits_neither_overflow_nor_vanish(at):
    whole = torch.full((ROWS, VOCABULARY), -1e30)
    whole[:, at] = 1e30
    same_as_whole(whole, torch.full((ROWS,), at))
    loss, _, gradient = split_loss(whole, torch.full((ROWS,), at))
    assert loss == 0.0, loss
    assert not gradient.any(), gradient


@spmd(world_size=2)
def test_shards_of_minus_infinity_have_no_probability():
    whole = random_logits()
    whole[:, :31] = -math.inf  # all that rank 0 holds
    loss, expected, gradient = split_loss(whole, torch.full((ROWS,), 40))
    torch.testing.assert_close(loss, reference(whole, torch.full((ROWS,), 40))[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@spmd(world_size=2)
def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    loss, _, _ = split_loss(torch.zeros(ROWS, VOCABULARY, dtype=torch.float64), random_targets())
    assert abs(loss.item() - 4.110873864173311) < 1e-14, loss


@spmd(world_size=2)
def test_many_rows_are_computed_in_runs():
    """A shard of which a float32 copy would take 31 MiB, beyond what is converted at once."""
    rows = 1 << 18
    whole = torch.zeros(rows, VOCABULARY, dtype=torch.bfloat16)
    whole[-1, 60] = 2.0
    targets = torch.full((rows,), 60)
    shard = Shard(1, (VOCABULARY,))
    local = shard.cut(whole, dist.get_rank(), 2)
    first = shard.pieces(dist.get_rank(), 2)[0].start
    losses = vocabulary_parallel_cross_entropy(
        local, targets, dist.group.WORLD, first=first, vocabulary=VOCABULARY, reduction="none"
    )
    torch.testing.assert_close(losses[:-1], torch.full((rows - 1,), math.log(61)), rtol=0, atol=1e-6)
    assert abs(losses[-1].item() - (math.log(60 + math.exp(2)) - 2)) < 1e-6


@spmd(world_size=4)
def test_loss_has_the_same_bits_on_all_peers():
    loss, _, _ = split_loss(random_logits(torch.float32), random_targets(), reduction="none")
    seen = [torch.empty_like(loss) for _ in range(4)]
    dist.all_gather(seen, loss)
    assert all(torch.equal(other, loss) for other in seen)
