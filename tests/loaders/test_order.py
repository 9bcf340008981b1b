import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.loaders.order import order_of, rest_of, samples_in


def drawn(sampler, own=None):
    """A sampler's order and its description, and the order that this gives elsewhere."""
    before, mine = torch.get_rng_state(), None if own is None else own.get_state()
    order = list(sampler)
    torch.manual_seed(77)
    return order, samples_in(order_of(sampler, before, mine), 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda own: SequentialSampler(range(10)),
        lambda own: RandomSampler(range(10)),
        lambda own: RandomSampler(range(10), replacement=True, num_samples=70),
        lambda own: RandomSampler(range(10), generator=own),
        lambda own: DistributedSampler(range(10), 1, 0, seed=4),
        lambda own: DistributedSampler(range(10), 1, 0, shuffle=False),
    ],
)
def test_order_is_found_again(make):
    own = torch.Generator().manual_seed(8)
    sampler = make(own)
    order, again = drawn(sampler, own if getattr(sampler, "generator", None) is own else None)
    assert again == order


def test_order_is_found_without_moving_the_generator():
    order = order_of(RandomSampler(range(10)), torch.get_rng_state(), None)
    before = torch.get_rng_state()
    samples_in(order, 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_orders_of_other_kinds_are_not_guessed():
    assert order_of(BatchSampler(range(4), 2, False), torch.get_rng_state(), None) is None


@pytest.mark.parametrize(
    ("seen", "drop_last", "by_replica"),
    [
        (0, False, [[9, 7, 5, 3], [8, 6, 4, 9]]),
        (0, True, [[9, 7, 5], [8, 6, 4]]),
        (4, False, [[5, 3], [4, 9]]),
        (6, False, [[3], [9]]),
        (6, True, [[], []]),
        (7, False, [[], []]),
    ],
)
def test_rest_is_dealt_like_the_whole(seen, drop_last, by_replica):
    order = [9, 8, 7, 6, 5, 4, 3]
    found = [rest_of(order, seen, replica=r, num_replicas=2, drop_last=drop_last) for r in range(2)]
    assert found == by_replica
