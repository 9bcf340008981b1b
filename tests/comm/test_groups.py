from dataclasses import astuple

import pytest
import torch.distributed as dist

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.topology import Topology
from tests.spmd import run_spmd, spmd

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 3, 1), (1, 2, 2), (2, 2, 2)]


def memberships(t, p, d):
    """For each group of this rank, the global ranks in it; and where it stands."""
    groups = Groups.create(Topology(t, p, d), "cpu")
    names = ("tensor", "data", "pipeline", "replica", "ends", "world")
    found = {name: getattr(groups, name) for name in names}
    members = {name: None if g is None else sorted(dist.get_process_group_ranks(g)) for name, g in found.items()}
    ends = groups.is_first_pipeline_rank, groups.is_last_pipeline_rank
    order = groups.pipeline_ranks
    groups.destroy()
    return members, astuple(groups.at), ends, order


@pytest.mark.parametrize(("t", "p", "d"), LAYOUTS)
def test_members_are_those_of_the_topology(t, p, d):
    topology = Topology(t, p, d)
    for rank, (members, at, ends, order) in enumerate(run_spmd(memberships, world_size=t * p * d, t=t, p=p, d=d)):
        coordinate = topology.coordinate(rank)
        line = topology.pipeline_ranks(coordinate)
        assert members == {
            "tensor": topology.tensor_ranks(coordinate),
            "data": topology.data_ranks(coordinate),
            "pipeline": sorted(line),
            "replica": topology.replica_ranks(coordinate),
            "ends": sorted({line[0], line[-1]}) if rank in (line[0], line[-1]) else None,
            "world": list(range(t * p * d)),
        }
        assert at == astuple(coordinate)
        assert ends == (rank == line[0], rank == line[-1])
        assert order == line


def test_global_rank_0_is_on_the_last_stage():
    members, _, (is_first, is_last), order = run_spmd(memberships, world_size=2, t=1, p=2, d=1)[0]
    assert (is_first, is_last) == (False, True)
    assert order == [1, 0]
    assert members["pipeline"] == [0, 1]


@spmd(world_size=2)
def test_world_of_another_size_is_refused():
    with pytest.raises(ValueError, match="t \\* p \\* d = 4 ranks, the world 2"):
        Groups.create(Topology(2, 2, 1), "cpu")
