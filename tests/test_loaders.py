from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.sampler import UnrepeatedSampler
from lightning_ptdp.loaders import EvenLoader, ghost_batch, prepare
from lightning_ptdp.topology import Coordinate, Topology
from tests.spmd import run_spmd


def prepared(loader, *, d=2, evaluates=True, replica=1):
    groups = SimpleNamespace(topology=Topology(data_parallel_size=d), at=Coordinate(0, replica, 0))
    return prepare(loader, groups, evaluates=evaluates, warn=pytest.fail)


def distributed(n=5, **options):
    return DataLoader(range(n), sampler=DistributedSampler(range(n), 2, 1, shuffle=False), **options)


class Count(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


def test_what_is_no_loader_is_passed_on():
    batches = [1, 2, 3]
    assert prepared(batches) is batches


def test_evaluation_repeats_no_sample_and_names_the_batch_that_does_not_count():
    loader = prepared(distributed())
    assert [batch.tolist() for batch in loader] == [[1], [3], [0]]
    assert ghost_batch(loader) == 2


def prepare_for_training(sizes, kind):
    """Whether the loader is kept, how many batches it says and gives, and what is warned of."""
    groups, warned = Groups.create(Topology(data_parallel_size=2), "cpu"), []
    size = sizes[dist.get_rank()]
    loader = {"sampler": DataLoader(range(size)), "list": list(range(size)), "stream": DataLoader(Count(size))}[kind]
    ready = prepare(loader, groups, evaluates=False, warn=warned.append)
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


def test_users_own_order_is_left_alone():
    loader = prepared(DataLoader(range(5)))
    assert isinstance(loader.batch_sampler.sampler, SequentialSampler)


def test_one_replica_needs_nothing():
    loader = prepared(distributed(), d=1)
    assert not isinstance(loader.batch_sampler.sampler, UnrepeatedSampler)
    stream = DataLoader(Count(3))
    assert prepared(stream, d=1) is stream


def test_workers_are_seeded_by_replica_unless_the_user_seeds_them():
    loader = prepared(DataLoader(range(5), num_workers=1), replica=1)
    assert loader.worker_init_fn.keywords == {"rank": 1}
    own = DataLoader(range(5), num_workers=1, worker_init_fn=print)
    assert prepared(own).worker_init_fn is print


def test_stream_is_made_even():
    assert isinstance(prepared(DataLoader(Count(3))), EvenLoader)


def take_all(counts, evaluates, epochs=1):
    """The values that this replica gets, where its batches stop to count, and what it was warned of; for each epoch."""
    groups, warned = Groups.create(Topology(data_parallel_size=dist.get_world_size()), "cpu"), []
    source = DataLoader(Count(counts[dist.get_rank()]), batch_size=None)
    loader = EvenLoader(source, groups, repeats_last=evaluates, warn=warned.append)
    found = [(list(loader), loader.ghost_from) for _ in range(epochs)]
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


def first_of(counts):
    groups = Groups.create(Topology(data_parallel_size=2), "cpu")
    loader = EvenLoader(DataLoader(Count(counts[dist.get_rank()])), groups, repeats_last=True, warn=print)
    try:
        next(iter(loader))
    except RuntimeError as error:
        return str(error)
    return None


def test_replica_without_any_evaluation_batch_is_told():
    _, told = run_spmd(first_of, counts=(2, 0))
    assert told.startswith("replica 1 has no batch at all in an evaluation where others have")
