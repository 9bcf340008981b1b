from itertools import product

import pytest

from lightning_ptdp.topology import Coordinate, Topology

GRID = [Topology(t, p, d) for t, p, d in product((1, 2, 4), (1, 2, 3), (1, 2, 3))]


def test_rank_0_is_on_the_last_stage_and_tensor_peers_are_neighbours():
    topology = Topology(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert [topology.coordinate(rank) for rank in range(8)] == [
        Coordinate(tensor=0, data=0, pipeline=1),
        Coordinate(tensor=1, data=0, pipeline=1),
        Coordinate(tensor=0, data=1, pipeline=1),
        Coordinate(tensor=1, data=1, pipeline=1),
        Coordinate(tensor=0, data=0, pipeline=0),
        Coordinate(tensor=1, data=0, pipeline=0),
        Coordinate(tensor=0, data=1, pipeline=0),
        Coordinate(tensor=1, data=1, pipeline=0),
    ]


@pytest.mark.parametrize("topology", GRID, ids=str)
def test_ranks_and_coordinates_are_inverse(topology):
    ranks = range(topology.world_size)
    assert [topology.rank(topology.coordinate(rank)) for rank in ranks] == list(ranks)
    assert len({topology.coordinate(rank) for rank in ranks}) == topology.world_size


def test_peers_of_a_rank_are_these():
    topology = Topology(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=2)
    at = topology.coordinate(5)
    assert at == Coordinate(tensor=1, data=0, pipeline=1)
    assert topology.tensor_ranks(at) == [4, 5]
    assert topology.data_ranks(at) == [5, 7]
    assert topology.pipeline_ranks(at) == [9, 5, 1]  # from the first stage to the last
    assert topology.replica_ranks(at) == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize("topology", GRID, ids=str)
def test_replicas_part_the_world(topology):
    replicas = [topology.replica_ranks(Coordinate(0, data, 0)) for data in range(topology.data_parallel_size)]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(topology.world_size))


def test_rank_is_described_in_words():
    assert Topology(2, 2, 2).describe(3) == "rank 3 (pipeline rank 1, replica 1, tensor rank 1)"
