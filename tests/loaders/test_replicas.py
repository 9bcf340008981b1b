from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.loaders.replicas import EvenLoader, ghosts, is_split, leaves, prepare
from lightning_ptdp.loaders.sampler import UnrepeatedSampler
from lightning_ptdp.topology import Coordinate, Topology
from tests.spmd import run_spmd


def prepared(loader, *, d=2, stage=RunningStage.VALIDATING, replica=1, splits_samples=True):
    alone = SimpleNamespace(size=lambda: 1)  # a group for what asks peers, where no peers are needed
    groups = SimpleNamespace(topology=Topology(data_parallel_size=d), at=Coordinate(0, replica, 0), data=alone)
    return prepare(loader, groups, stage=stage, splits_samples=splits_samples, warn=pytest.fail)


def ghost_of(loader):
    source = ghosts(loader)
    return source.ghost_batch if source is not None else None


def distributed(n=5, **options):
    return DataLoader(range(n), sampler=DistributedSampler(range(n), 2, 1, shuffle=False), **options)


class Count(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Pairs(BatchSampler):
    """Batches of two, by other means than `BatchSampler`'s."""

    def __init__(self, sampler):
        super().__init__(sampler, 2, False)

    def __iter__(self):
        return iter(torch.tensor(list(self.sampler)).split(2))


def test_what_is_no_loader_is_passed_on_and_made_even_in_evaluation():
    batches = [1, 2, 3]
    assert prepared(batches, stage=RunningStage.TRAINING) is batches
    even = prepared(batches, replica=0)
    assert isinstance(even, EvenLoader)
    assert (list(even), len(even), even.ghost_batch) == ([1, 2, 3], 3, 3)


def test_evaluation_repeats_no_sample_and_names_the_batch_that_does_not_count():
    loader = prepared(distributed())
    assert [batch.tolist() for batch in loader] == [[1], [3], [0]]
    assert ghost_of(loader) == 2


def prepare_for_training(sizes, kind):
    """Whether the loader is kept, how many batches it says and gives, and what is warned of."""
    groups, warned = Groups.create(Topology(data_parallel_size=2), "cpu"), []
    size = sizes[dist.get_rank()]
    loader = {"sampler": DataLoader(range(size)), "list": list(range(size)), "stream": DataLoader(Count(size))}[kind]
    ready = prepare(loader, groups, stage=RunningStage.TRAINING, splits_samples=False, warn=warned.append)
    length = None if kind == "stream" else len(ready)
    found = ready is loader, length, len(list(ready)), warned
    groups.destroy()
    return found


@pytest.mark.parametrize("kind", ["sampler", "list"])
def test_training_loaders_of_one_length_are_left_alone(kind):
    assert run_spmd(prepare_for_training, sizes=(3, 3), kind=kind) == [(True, 3, 3, [])] * 2


@pytest.mark.parametrize("kind", ["sampler", "list"])
def test_longer_training_loader_ends_with_the_shorter(kind):
    for is_kept, length, given, (warning,) in run_spmd(prepare_for_training, sizes=(5, 3), kind=kind):
        assert (is_kept, length, given) == (False, 3, 3)
        assert "[5, 3] batches on replicas 0 to 1; an epoch ends after 3 on all" in warning


def test_training_stream_without_a_length_is_made_even():
    for is_kept, _, given, (warning,) in run_spmd(prepare_for_training, sizes=(5, 3), kind="stream"):
        assert (is_kept, given) == (False, 3)
        assert "ended on replica 1 after 3 batches" in warning


def test_training_keeps_its_sampler():
    loader = prepared(distributed(), stage=RunningStage.TRAINING)
    assert isinstance(loader.batch_sampler.sampler, DistributedSampler)
    assert ghost_of(loader) is None


def test_users_own_order_is_left_alone_and_made_even():
    loader = prepared(DataLoader(range(5)))
    assert isinstance(loader, EvenLoader)
    assert isinstance(loader.batch_sampler.sampler, SequentialSampler)


def test_loader_without_batches_names_the_sample_that_does_not_count():
    loader = prepared(distributed(batch_size=None))
    assert (list(loader), ghost_of(loader)) == ([1, 3, 0], 2)
    assert ghost_of(prepared(distributed(n=6, batch_size=None))) is None


def test_sampler_that_repeats_nothing_is_kept():
    sampler = DistributedSampler(range(5), 2, 1, shuffle=False, drop_last=True)
    loader = prepared(DataLoader(range(5), batch_size=2, sampler=sampler))
    assert (loader.batch_sampler.sampler, ghost_of(loader)) == (sampler, None)


def test_batch_sampler_of_the_user_repeats_no_sample_and_is_made_even():
    drawn = Pairs(DistributedSampler(range(5), 2, 1, shuffle=False))
    loader = prepared(DataLoader(range(5), batch_sampler=drawn), replica=0)
    assert isinstance(loader, EvenLoader)
    assert [batch.tolist() for batch in loader] == [[1, 3]]
    assert ghost_of(loader) == 1


def test_prediction_shares_out_batches():
    drawn = _IndexBatchSamplerWrapper(BatchSampler(range(7), 2, False))
    loader = prepared(DataLoader(range(7), batch_sampler=drawn), stage=RunningStage.PREDICTING)
    assert is_split(loader)
    assert ([batch.tolist() for batch in loader], len(loader)) == ([[2, 3], [6]], 2)
    assert drawn.seen_batch_indices == [[2, 3], [6]]
    single = prepared(DataLoader(range(3), batch_size=None), stage=RunningStage.PREDICTING)
    assert (is_split(single), list(single), len(single)) == (True, [1], 2)


@pytest.mark.parametrize(
    ("make", "splits_samples"),
    [(lambda: DataLoader(Count(3)), True), (distributed, True), (lambda: DataLoader(range(3)), False)],
)
def test_prediction_leaves_alone_what_it_may_not_split(make, splits_samples):
    loader = make()
    assert prepared(loader, stage=RunningStage.PREDICTING, splits_samples=splits_samples) is loader
    assert not is_split(loader)


def test_leaves_take_a_list_of_plain_values_for_a_loader():
    loaders = {"a": [1, 2], "b": (iter(()), [DataLoader(range(2))])}
    assert leaves(loaders) == [loaders["a"], loaders["b"][0], loaders["b"][1][0]]


def test_one_replica_needs_nothing():
    loader = prepared(distributed(), d=1)
    assert not isinstance(loader.batch_sampler.sampler, UnrepeatedSampler)
    stream = DataLoader(Count(3))
    assert prepared(stream, d=1) is stream


def test_workers_are_seeded_by_replica_unless_the_user_seeds_them():
    loader = prepared(distributed(num_workers=1), replica=1)
    assert loader.worker_init_fn.keywords == {"rank": 1}
    own = distributed(num_workers=1, worker_init_fn=print)
    assert prepared(own).worker_init_fn is print


def test_stream_is_made_even():
    assert isinstance(prepared(DataLoader(Count(3))), EvenLoader)


def take_all(counts, evaluates, epochs=1):
    """The values that this replica gets, where its batches stop to count, and what it was warned of; for each epoch."""
    groups, warned = Groups.create(Topology(data_parallel_size=dist.get_world_size()), "cpu"), []
    source = DataLoader(Count(counts[dist.get_rank()]), batch_size=None)
    loader = EvenLoader(source, groups, repeats_last=evaluates, warn=warned.append)
    found = [(list(loader), loader.ghost_batch) for _ in range(epochs)]
    groups.destroy()
    return found, warned


@pytest.mark.parametrize("counts", [(5, 4), (4, 5), (4, 9)])
def test_training_ends_with_the_shortest_replica_and_says_which_it_was(counts):
    short = counts.index(4)
    for found, (warning,) in run_spmd(take_all, counts=counts, evaluates=False):
        assert [values for values, _ in found] == [[0, 1, 2, 3]]
        assert f"ended on replica {short} after 4 batches while other replicas have more" in warning


def test_even_streams_are_not_warned_of():
    for found, warned in run_spmd(take_all, counts=(3, 3), evaluates=False, epochs=2):
        assert [values for values, _ in found] == [[0, 1, 2]] * 2
        assert warned == []


def test_evaluation_goes_on_until_all_are_through_and_repeats_do_not_count():
    long, short = run_spmd(take_all, counts=(3, 1), evaluates=True, epochs=2)
    assert long == ([([0, 1, 2], 3)] * 2, [])
    assert short == ([([0, 0, 0], 1)] * 2, [])


def test_replica_without_any_evaluation_batch_is_lent_one():
    long, short = run_spmd(take_all, counts=(2, 0), evaluates=True)
    assert long == ([([0, 1], 2)], [])
    assert short == ([([0, 0], 0)], [])


def test_evaluation_of_nothing_ends_at_once():
    assert run_spmd(take_all, counts=(0, 0), evaluates=True) == [([([], 0)], [])] * 2


def lengths_of(loaders):
    """The length that a loader has once it is prepared, for training and for evaluation."""
    groups = Groups.create(Topology(data_parallel_size=2), "cpu")
    mine = loaders[dist.get_rank()]
    stages = (RunningStage.TRAINING, RunningStage.VALIDATING)
    even = [prepare(mine, groups, stage=stage, splits_samples=False, warn=print) for stage in stages]
    groups.destroy()
    return [sized_len(loader) for loader in even]


@pytest.mark.parametrize(
    ("loaders", "lengths"), [([[1, 2], [3, 4]], [2, 2]), ([[1, 2], [3]], [1, 2]), ([[1], None], [None, None])]
)
def test_length_is_what_all_replicas_will_give(loaders, lengths):
    assert run_spmd(lengths_of, loaders=loaders) == [lengths, lengths]
