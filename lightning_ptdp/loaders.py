"""What the strategy does to a user's loaders: evaluation without repeats, workers seeded by replica, equal ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.comm.collectives import MIN, all_reduce_, gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.sampler import UnrepeatedSampler


def prepare(loader: object, groups: Groups, *, evaluates: bool, warn: Callable[[str], None]) -> object:
    """Adapt a loader to the replicas; anything that is no `DataLoader` is passed on.

    evaluates: whether each sample must count once.
    """
    if not isinstance(loader, DataLoader):
        return loader
    is_seeded = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))  # by seed_everything(workers=True)
    if loader.num_workers > 0 and loader.worker_init_fn is None and (is_seeded or groups.data.size() > 1):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=groups.at.data)
    if groups.topology.data_parallel_size == 1:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return EvenLoader(loader, groups, repeats_last=evaluates, warn=warn)
    sampler = loader.sampler
    if evaluates and isinstance(sampler, DistributedSampler) and isinstance(loader.batch_sampler, BatchSampler):
        loader.batch_sampler.sampler = UnrepeatedSampler(sampler, loader.batch_sampler.batch_size)
    return loader


def ghost_batch(loader: object) -> int | None:
    """The index of the batch that must not count on this replica, if the loader has one."""
    if isinstance(loader, EvenLoader):
        return loader.ghost_from
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, BatchSampler):
        sampler = loader.batch_sampler.sampler
        return sampler.ghost_batch if isinstance(sampler, UnrepeatedSampler) else None
    return None


class EvenLoader:
    """An iterable loader that ends on all replicas at once.

    Before each batch the replicas ask each other whether all have one. In training they stop with the first that has
    none, with a warning that names it; in evaluation those that are done repeat their last batch, which must not count
    (from index `ghost_from` on), until the last replica is done.
    """

    def __init__(
        self, loader: DataLoader[Any], groups: Groups, *, repeats_last: bool, warn: Callable[[str], None]
    ) -> None:
        self._loader, self._groups, self._repeats_last, self._warn = loader, groups, repeats_last, warn
        self.ghost_from: int | None = None

    @property
    def dataset(self) -> Any:
        """The loader's data set."""
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        """The loader's sampler."""
        return self._loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The loader's batch sampler."""
        return self._loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        self.ghost_from = None
        batch, count = None, 0
        for batch in self._loader:
            if not self._go_on(has_batch=True):
                self._say_who_ended(count + 1)
                return
            yield batch
            count += 1
        self.ghost_from = count
        while self._go_on(has_batch=False):
            if batch is None:
                raise RuntimeError(
                    f"replica {self._groups.at.data} has no batch at all in an evaluation where others have; give "
                    "every replica at least one"
                )
            yield batch

    def _go_on(self, *, has_batch: bool) -> bool:
        """Whether another step follows: in training while all have a batch, in evaluation while any has."""
        mine = torch.tensor(int(has_batch), dtype=torch.int64)
        if self._repeats_last:
            return not bool(all_reduce_(1 - mine, self._groups.data, MIN))
        all_have = bool(all_reduce_(mine, self._groups.data, MIN))
        if not all_have and not has_batch:
            self._say_who_ended(None)
        return all_have

    def _say_who_ended(self, had: int | None) -> None:
        counts = gather_objects(had, self._groups.data)
        ended = [replica for replica, count in enumerate(counts) if count is None]
        most = max(count for count in counts if count is not None) if len(ended) < len(counts) else None
        if most is not None:
            self._warn(
                f"training data ended on replica {ended[0]} after {most - 1} batches while other replicas have more; "
                "the epoch ends there on all, and the rest is not seen"
            )
