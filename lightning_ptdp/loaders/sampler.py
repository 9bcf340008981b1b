"""Samplers by which replicas evaluate or predict each sample exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from math import ceil
from typing import Any, Protocol

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler


class UnrepeatedSampler(Sampler[int]):
    """Reads a `DistributedSampler` without the samples that it repeats to make replicas even.

    Sample i of the epoch's order goes to replica i mod d. Replicas then differ by one sample at most. Where that would
    cost a replica its last batch, it keeps one repeated sample, alone in a batch that must not count (`ghost_batch`):
    so that every replica takes part in as many steps, and joins every collective in them. Where batches that are not
    full are dropped, those of all replicas together count as one batch, and there is no ghost.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int | None, *, drop_last: bool = False) -> None:
        """
        Args:
            sampler: of this replica; it repeats samples at the end.
            batch_size: samples a batch; None if it is not known, and then no sample is repeated.
            drop_last: whether the loader drops a batch that is not full.
        """
        self.sampler = sampler
        total, d, rank = _length(sampler), sampler.num_replicas, sampler.rank
        if batch_size is not None and drop_last:
            total -= total % (d * batch_size)
        num_samples = [len(range(replica, total, d)) for replica in range(d)]
        batches = [ceil(count / (batch_size or total or 1)) for count in num_samples]
        self.replica, self._real = rank, num_samples[rank]
        self.ghost_batches = [k if batch_size is not None and k < max(batches) else None for k in batches]

    @property
    def ghost_batch(self) -> int | None:
        """The index of the batch that must not count on this replica; `ghost_batches` has those of all."""
        return self.ghost_batches[self.replica]

    def __len__(self) -> int:
        return self._real + (self.ghost_batch is not None)

    def __iter__(self) -> Iterator[int]:
        return islice(self.sampler, len(self))

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler which epoch comes, as a `DistributedSampler` wants it."""
        self.sampler.set_epoch(epoch)


def _length(sampler: DistributedSampler[Any]) -> int:
    assert isinstance(sampler.dataset, Sized), "a DistributedSampler needs a dataset with a length"
    return len(sampler.dataset)


class Batches(Protocol):
    """Draws batches, as a `BatchSampler` does."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


class BatchesOfReplica:
    """One replica's batches of those that a sampler draws: batch i goes to replica i mod d, whole and unrepeated.

    The last replicas may get one batch less. The length is that of the replica with most, so that a fraction of it is
    the same number on every replica.
    """

    def __init__(self, batches: Batches, *, replica: int, num_replicas: int) -> None:
        """
        Args:
            batches: drawn in the same order by every replica.
            replica: number of this one.
            num_replicas: d.
        """
        self.batches, self._replica, self._num_replicas = batches, replica, num_replicas

    def __len__(self) -> int:
        return ceil(len(self.batches) / self._num_replicas)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batches, self._replica, None, self._num_replicas)


def interleave(by_replica: list[list[Any]]) -> list[Any]:
    """Join what replicas made of their batches, in the order of one process: item i of replica r is item i * d + r."""
    longest = max(map(len, by_replica))
    return [mine[i] for i in range(longest) for mine in by_replica if i < len(mine)]
