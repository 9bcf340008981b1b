"""What the strategy does to a user's loaders: evaluation without repeats, workers seeded by replica, equal ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.comm.collectives import MIN, all_reduce_, gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.sampler import UnrepeatedSampler


def prepare(loader: object, groups: Groups, *, evaluates: bool, warn: Callable[[str], None]) -> object:
    """Adapt a loader to the replicas; every rank must call this.

    loader: a `DataLoader`, or in training any iterable over batches. evaluates: whether each sample must count once.
    """
    if not isinstance(loader, DataLoader):
        return loader if evaluates or groups.topology.data_parallel_size == 1 else _evened(loader, groups, warn)
    is_seeded = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))  # by seed_everything(workers=True)
    if (
        loader.num_workers > 0
        and loader.worker_init_fn is None
        and (is_seeded or groups.topology.data_parallel_size > 1)
    ):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=groups.at.data)
    if groups.topology.data_parallel_size == 1:
        return loader
    if not evaluates:
        return _evened(loader, groups, warn)
    if isinstance(loader.dataset, IterableDataset):
        return EvenLoader(loader, groups, repeats_last=True, warn=warn)
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and isinstance(loader.batch_sampler, BatchSampler):
        loader.batch_sampler.sampler = UnrepeatedSampler(sampler, loader.batch_sampler.batch_size)
    return loader


def _evened(loader: Any, groups: Groups, warn: Callable[[str], None]) -> object:
    """A training loader that gives all replicas as many batches, where it is not known that the user's does."""
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    lengths = gather_objects(sized_len(loader), groups.data)
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return EvenLoader(loader, groups, repeats_last=False, warn=warn)
    if len(set(known)) > 1:
        warn(
            f"training data has {known} batches on replicas 0 to {len(known) - 1}; an epoch ends after {min(known)} on "
            "all, and the rest is not seen"
        )
    elif not is_stream:  # whose length is a promise
        return loader
    return EvenLoader(loader, groups, repeats_last=False, warn=warn, length=min(known))


def ghost_batch(loader: object) -> int | None:
    """The index of the batch that must not count on this replica, if the loader has one."""
    if isinstance(loader, EvenLoader):
        return loader.ghost_from
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, BatchSampler):
        sampler = loader.batch_sampler.sampler
        return sampler.ghost_batch if isinstance(sampler, UnrepeatedSampler) else None
    return None


class EvenLoader:
    """A loader that ends on all replicas at once.

    Before each batch the replicas ask each other whether all have one. In training they stop with the first that has
    none, with a warning that names it; in evaluation those that are done repeat their last batch, which must not count
    (from index `ghost_from` on), until the last replica is done.
    """

    def __init__(
        self,
        loader: Any,
        groups: Groups,
        *,
        repeats_last: bool,
        warn: Callable[[str], None],
        length: int | None = None,
    ) -> None:
        """loader: an iterable. length: batches that every replica has, None where that is not known."""
        self._loader, self._groups, self._repeats_last, self._warn = loader, groups, repeats_last, warn
        self._length = length
        self.ghost_from: int | None = None
        if isinstance(loader, _Stateful):  # Lightning looks for these to resume in the middle of an epoch
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the number of batches is not known on every replica")
        return self._length

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
        if most is not None and (self._length is None or most <= self._length):
            self._warn(
                f"training data ended on replica {ended[0]} after {most - 1} batches while other replicas have more; "
                "the epoch ends there on all, and the rest is not seen"
            )
