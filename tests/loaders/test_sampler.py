from itertools import product

import pytest
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.loaders.sampler import BatchesOfReplica, UnrepeatedSampler, interleave

GRID = list(product(range(1, 13), (1, 2, 3, 4), (1, 2, 3, 5)))


def replicas(n, d, batch_size, shuffle=False):
    """For each replica its batches, and the index of the one that does not count."""
    found = []
    for rank in range(d):
        inner = DistributedSampler(range(n), num_replicas=d, rank=rank, shuffle=shuffle)
        sampler = UnrepeatedSampler(inner, batch_size)
        batches = [batch.tolist() for batch in DataLoader(range(n), batch_size, sampler=sampler)]
        found.append((batches, sampler.ghost_batch, len(sampler)))
    return found


@pytest.mark.parametrize(("n", "d", "batch_size"), GRID)
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_counts_once_in_equally_many_batches(n, d, batch_size, shuffle):
    every = replicas(n, d, batch_size, shuffle)
    counted = [i for batches, ghost, _ in every for batch in batches[:ghost] for i in batch]
    assert sorted(counted) == list(range(n))
    assert len({len(batches) for batches, _, _ in every}) == 1
    for batches, ghost, length in every:
        assert sum(map(len, batches)) == length
        assert ghost is None or (ghost == len(batches) - 1 and len(batches[-1]) == 1)


def test_replica_that_would_lack_a_batch_repeats_one_sample():
    assert replicas(5, 2, 1) == [([[0], [2], [4]], None, 3), ([[1], [3], [0]], 2, 3)]


def test_replica_without_any_sample_takes_part_all_the_same():
    assert replicas(1, 3, 4) == [([[0]], None, 1), ([[0]], 0, 1), ([[0]], 0, 1)]


@pytest.mark.parametrize(("n", "d", "batch_size"), GRID)
def test_dropped_batches_are_those_of_all_replicas_together(n, d, batch_size):
    counted = []
    for rank in range(d):
        inner = DistributedSampler(range(n), num_replicas=d, rank=rank, shuffle=False)
        sampler = UnrepeatedSampler(inner, batch_size, drop_last=True)
        batches = [b.tolist() for b in DataLoader(range(n), batch_size, sampler=sampler, drop_last=True)]
        assert (len(batches), sampler.ghost_batch) == (n // (d * batch_size), None)
        counted += [i for batch in batches for i in batch]
    assert sorted(counted) == list(range(n - n % (d * batch_size)))


def test_without_a_batch_size_nothing_is_repeated():
    samplers = [UnrepeatedSampler(DistributedSampler(range(4), 3, rank, shuffle=False), None) for rank in range(3)]
    assert [(list(sampler), sampler.ghost_batch) for sampler in samplers] == [([0, 3], None), ([1], None), ([2], None)]


@pytest.mark.parametrize(("n", "d", "batch_size"), GRID)
def test_shares_of_batches_interleave_to_the_whole(n, d, batch_size):
    whole = BatchSampler(range(n), batch_size, drop_last=False)
    dealt = [BatchesOfReplica(whole, replica=replica, num_replicas=d) for replica in range(d)]
    assert interleave([list(mine) for mine in dealt]) == list(whole)
    assert {len(mine) for mine in dealt} == {len(list(dealt[0]))}


def test_order_follows_the_epoch_of_the_sampler():
    sampler = UnrepeatedSampler(DistributedSampler(range(8), num_replicas=2, rank=0, seed=3), 2)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
