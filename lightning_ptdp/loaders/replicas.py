"""What the strategy does to a user's loaders: each sample once, workers seeded by replica, equal ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.comm.collectives import all_gather_dim, broadcast_object, gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.host.lightning import IndexBatchSampler, Stateful, with_sampler, wrap_batches, wrapped_batches
from lightning_ptdp.host.torch import pytree
from lightning_ptdp.loaders.sampler import BatchesOfReplica, UnrepeatedSampler


def prepare(
    loader: object,
    groups: Groups,
    *,
    stage: RunningStage,
    splits_samples: bool,
    warn: Callable[[str], None],
    resumable: Callable[[object], object] = lambda loader: loader,
) -> object:
    """Adapt a loader to the replicas, by what it is read for.

    In training all replicas get equally many batches, in evaluation no sample counts twice, and for prediction each
    batch goes to one replica. Workers are seeded by replica.

    Args:
        loader: the user's, with the sampler that Lightning gave it.
        stage: what it is read for.
        splits_samples: whether replicas may split the samples that a loader draws for prediction.
        warn: takes a sentence for the user.
        resumable: wraps a training loader without `state_dict` in one that has it.
    """
    if isinstance(loader, DataLoader):
        _seed_workers(loader, groups)
    if stage == RunningStage.TRAINING and not isinstance(loader, Stateful):
        loader = resumable(loader)
    if groups.topology.data_parallel_size == 1:
        return loader
    if stage == RunningStage.PREDICTING:
        return _each_batch_once(loader, groups) if splits_samples and isinstance(loader, DataLoader) else loader
    if stage.evaluating:
        return _each_sample_once(loader, groups, warn)
    return _evened(loader, groups, warn)


def _seed_workers(loader: DataLoader[Any], groups: Groups) -> None:
    is_seeded = bool(int(os.environ.get("PL_SEED_WORKERS", "0")))  # by seed_everything(workers=True)
    if (
        loader.num_workers > 0
        and loader.worker_init_fn is None
        and (is_seeded or groups.topology.data_parallel_size > 1)
    ):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=groups.at.data)


def _evened(loader: Any, groups: Groups, warn: Callable[[str], None]) -> object:
    """Wrap a training loader so that all replicas get equally many batches, unless its length says that they do."""
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    lengths = gather_objects(sized_len(loader), groups.data)
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return EvenLoader(loader, groups, repeats_last=False, warn=warn)
    if len(set(known)) > 1:
        warn(
            f"training data has {known} batches on replicas 0 to {len(known) - 1}; an epoch ends after {min(known)} on "
            "all, and the rest is not seen"
        )
    elif not is_stream:  # the length of an iterable dataset is only a promise
        return loader
    return EvenLoader(loader, groups, repeats_last=False, warn=warn, length=min(known))


def _each_batch_once(loader: DataLoader[Any], groups: Groups) -> DataLoader[Any]:
    """Predict each batch on one replica; loaders that split by themselves, or cannot be split, are left alone."""
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler):
        return loader
    mine = partial(BatchesOfReplica, replica=groups.at.data, num_replicas=groups.topology.data_parallel_size)
    if isinstance(loader.batch_sampler, IndexBatchSampler):  # which tells writers the samples of each batch
        wrap_batches(loader.batch_sampler, mine(wrapped_batches(loader.batch_sampler)))
        return loader
    samples = mine(loader.sampler)  # type: ignore[arg-type]  # without a length, the loader has none either
    return with_sampler(loader, samples)


def is_split(loader: object) -> bool:
    """Whether replicas split the batches that the loader draws for prediction."""
    drawn = getattr(loader, "batch_sampler", None)
    if isinstance(drawn, IndexBatchSampler):
        return isinstance(wrapped_batches(drawn), BatchesOfReplica)
    return isinstance(getattr(loader, "sampler", None), BatchesOfReplica)


def _each_sample_once(loader: object, groups: Groups, warn: Callable[[str], None]) -> object:
    """Let evaluation read no sample twice, and run equally many batches on every replica.

    The number of batches of an ordinary loader is known beforehand; of others the replicas tell each other.
    """
    sampler = _distributed_sampler(loader)
    if isinstance(loader, DataLoader) and sampler is not None:
        drawn = loader.batch_sampler
        if drawn is None or sampler.drop_last:
            return loader  # a repeated sample is a batch by itself, which `ghosts` tells apart; drop_last repeats none
        if type(drawn) is BatchSampler:
            drawn.sampler = UnrepeatedSampler(sampler, drawn.batch_size, drop_last=drawn.drop_last)
            return loader
        drawn.sampler = UnrepeatedSampler(sampler, None)  # type: ignore[attr-defined]  # where it was found
    lengths = gather_objects(sized_len(loader), groups.data)
    length = None if None in lengths else max(lengths)
    return EvenLoader(loader, groups, repeats_last=True, warn=warn, length=length)


def _distributed_sampler(loader: object) -> DistributedSampler[Any] | None:
    """What splits a loader's samples over the replicas: Lightning's, or one that the user gave."""
    drawn = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if drawn is None else drawn, "sampler", None)
    return sampler if isinstance(sampler, DistributedSampler) else None


def ghosts(loader: object) -> EvenLoader | UnrepeatedSampler | None:
    """Find the object whose `ghost_batches` say, for each replica, from which batch on a loader's must not count.

    A *ghost* is a batch that a replica runs only because others have one more. None if the loader gives no ghosts.
    """
    if isinstance(loader, EvenLoader):
        return loader
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_sampler is None:
        sampler = _distributed_sampler(loader)
        return None if sampler is None or sampler.drop_last else UnrepeatedSampler(sampler, 1)
    drawn_from = getattr(loader.batch_sampler, "sampler", None)
    return drawn_from if isinstance(drawn_from, UnrepeatedSampler) else None


def leaves(loaders: Any) -> list[Any]:
    """List the loaders of a collection in Lightning's order; a list of plain values is one loader, as it is there."""
    return pytree.tree_leaves(loaders, is_leaf=_is_plain_list)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str | int | float | bool) for item in value)


class EvenLoader:
    """An iterable that ends on all replicas at once.

    Before each batch the replicas tell each other whether they have one. In training they stop with the first that has
    none, with a warning that names it; in evaluation those that are done repeat their last batch, which must not count
    (from index `ghost_batch` on), until the last replica is done. One that never had a batch is lent another's first.
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
        """
        Args:
            loader: gives this replica's batches.
            groups: of this rank.
            repeats_last: whether a replica that is done repeats its last batch (evaluation), or ends all (training).
            warn: takes a sentence for the user.
            length: batches until the end; None if that is not known.
        """
        self._loader, self._groups, self._repeats_last, self._warn = loader, groups, repeats_last, warn
        self._length = length
        self.replica = groups.at.data
        self.ghost_batches: list[int | None] = [None] * groups.topology.data_parallel_size
        if isinstance(loader, Stateful):  # Lightning looks for these to resume in the middle of an epoch
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    @property
    def ghost_batch(self) -> int | None:
        """The first batch that must not count on this replica, once it is there; `ghost_batches` has those of all."""
        return self.ghost_batches[self.replica]

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this loader has no length that the replicas agree on")
        return self._length

    @property
    def loader(self) -> Any:
        """The loader that is read."""
        return self._loader

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
        return self._repeating() if self._repeats_last else self._stopping()

    def _stopping(self) -> Iterator[Any]:
        for count, batch in enumerate(self._loader):
            if not all(self._who_has(True)):
                self._say_who_ended(count)
                return
            yield batch
        if any(self._who_has(False)):
            self._say_who_ended(None)

    def _repeating(self) -> Iterator[Any]:
        self.ghost_batches = [None] * len(self.ghost_batches)
        batch, count = None, 0
        for batch in self._loader:
            has = self._note(count, self._who_has(True))
            if count == 0:
                self._lend(batch, has)
            yield batch
            count += 1
        while any(has := self._note(count, self._who_has(False))):
            if count == 0:
                batch = self._lend(None, has)
            yield batch
            count += 1

    def _note(self, count: int, has: list[bool]) -> list[bool]:
        """Take down for whom batch number `count` is the first that must not count."""
        for replica, has_batch in enumerate(has):
            if not has_batch and self.ghost_batches[replica] is None:
                self.ghost_batches[replica] = count
        return has

    def _who_has(self, has_batch: bool) -> list[bool]:
        """Ask all replicas whether they have another batch."""
        group = self._groups.data
        return [bool(flag) for flag in all_gather_dim(torch.tensor([int(has_batch)]), group, 0, group.size()).tolist()]

    def _lend(self, batch: Any, has: list[bool]) -> Any:
        """Send the first batch of the first replica that has one to those that have none, and return it."""
        if all(has):
            return batch
        topology, at = self._groups.topology, self._groups.at
        lender = topology.data_ranks(at)[has.index(True)]
        return broadcast_object(batch, lender, self._groups.data)

    def _say_who_ended(self, had: int | None) -> None:
        """Warn that data ended on a replica, if others have more.

        Args:
            had: batches given so far, if this replica has another one; None if it has none.
        """
        counts = gather_objects(had, self._groups.data)
        ended = [replica for replica, count in enumerate(counts) if count is None]
        most = max(count for count in counts if count is not None)
        if most == self._length:
            return  # told beforehand
        self._warn(
            f"training data ended on replica {ended[0]} after {most} batches while other replicas have more; "
            "the epoch ends there on all, and the rest is not seen"
        )
