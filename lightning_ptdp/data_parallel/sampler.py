"""Which samples a replica evaluates: each exactly once, and as many batches on every replica."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler


class UnrepeatedSampler(Sampler[int]):
    """Reads a `DistributedSampler` without the samples that it repeats to make replicas even.

    Sample i of the epoch's order goes to replica i mod d. Replicas then differ by one sample at most. Where that would
    cost a replica its last batch, it keeps one repeated sample, alone in a batch that must not count (`ghost_batch`):
    so that every replica takes part in as many steps, and joins every collective in them.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int) -> None:
        """batch_size: samples a batch, 1 if the loader does not batch."""
        dataset = sampler.dataset
        assert isinstance(dataset, Sized), "a DistributedSampler needs a dataset with a length"
        self.sampler = sampler
        total, d, rank = len(dataset), sampler.num_replicas, sampler.rank
        self._real = len(range(rank, total, d))
        longest = len(range(0, total, d))
        batches, most = -(-self._real // batch_size), -(-longest // batch_size)
        self.ghost_batch: int | None = batches if batches < most else None

    def __len__(self) -> int:
        return self._real + (self.ghost_batch is not None)

    def __iter__(self) -> Iterator[int]:
        for position, index in enumerate(self.sampler):
            if position == len(self):
                return
            yield index

    def set_epoch(self, epoch: int) -> None:
        """As a `DistributedSampler` does."""
        self.sampler.set_epoch(epoch)
