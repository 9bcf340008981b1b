"""A world of threads does what a world of processes does, and says what would hang."""

import random
import threading

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.comm import collectives as c
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.comm.in_process import InProcessWorld, rank_in
from lightning_ptdp.comm.p2p import Messenger
from lightning_ptdp.topology import Topology
from tests.spmd import run_spmd

THREE = Topology(3, 1, 1)


def in_threads(body, topology=THREE):
    return InProcessWorld(topology).run(body)


def number(groups):
    return groups.rank + 1


COLLECTIVES = {
    "sum": lambda g: c.all_reduce_(torch.tensor([number(g)]), g.tensor),
    "max": lambda g: c.all_reduce_(torch.tensor([number(g)]), g.tensor, c.MAX),
    "min": lambda g: c.all_reduce_(torch.tensor([number(g)]), g.tensor, c.MIN),
    "gather": lambda g: c.all_gather_dim(torch.full((2, 2), float(number(g))), g.tensor, 1, 6),
    "uneven gather": lambda g: c.all_gather_dim(torch.full((2, (2, 2, 1)[g.rank]), float(g.rank)), g.tensor, 1, 5),
    "reduce-scatter": lambda g: c.reduce_scatter_dim(torch.arange(6.0)[None] * number(g), g.tensor, 1),
    "broadcast": lambda g: c.broadcast_(torch.tensor([number(g)]), 1, g.world),
    "object": lambda g: c.broadcast_object({"rank": g.rank}, 2, g.world),
    "objects": lambda g: c.gather_objects("x" * number(g), g.world),
    "barrier": lambda g: c.barrier(g.world),
}


def as_plain(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def in_a_process(name):
    return as_plain(COLLECTIVES[name](Groups.create(THREE, "cpu")))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_gives_what_processes_give(name):
    assert in_threads(lambda groups: as_plain(COLLECTIVES[name](groups))) == run_spmd(in_a_process, 3, name=name)


def test_operand_of_another_rank_is_not_shared():
    def body(groups):
        mine = torch.ones(1)
        c.broadcast_(mine, 0, groups.world)
        mine += groups.rank
        return c.all_reduce_(mine.clone(), groups.world).item()

    assert in_threads(body) == [6.0, 6.0, 6.0]


def test_groups_are_those_of_the_topology():
    def body(groups):
        names = "tensor", "data", "pipeline", "replica", "ends", "world"
        return {name: getattr(groups, name).ranks for name in names if getattr(groups, name) is not None}

    found = in_threads(body, Topology(2, 3, 1))
    assert found[1]["tensor"] == (0, 1)
    assert found[1]["pipeline"] == (1, 3, 5)
    assert found[1]["ends"] == (1, 5)
    assert "ends" not in found[3]
    assert found[4]["replica"] == found[4]["world"] == (0, 1, 2, 3, 4, 5)


def test_messages_arrive_in_the_order_sent_under_the_envelope():
    def body(groups):
        messenger = Messenger(groups.pipeline, torch.device("cpu"))
        if groups.rank == 1:
            for i in range(3):
                messenger.send((torch.full((2,), float(i)),), 0, ("sent", "key"), extra="note")
            return messenger.flush()
        arriving = [messenger.receive(1, ("sent", "key")) for _ in range(3)]
        return [(tensor.tolist(), a.envelope.extra) for a in reversed(arriving) for tensor in a.wait()]

    got, _ = in_threads(body, Topology(1, 2, 1))
    assert got == [([2.0, 2.0], "note"), ([1.0, 1.0], "note"), ([0.0, 0.0], "note")]


def test_backward_of_one_rank_waits_for_that_of_another():
    def body(groups):
        x = torch.full((2,), 1.0 + groups.rank, requires_grad=True)
        (c.copy_to(x, groups.tensor) * number(groups)).sum().backward()
        return x.grad.tolist()

    assert in_threads(body) == [[6.0, 6.0]] * 3


def test_each_rank_has_generators_of_its_own():
    def body(groups):
        drawn = []
        for _ in range(2):
            drawn.append((torch.rand(()).item(), random.random()))
            c.barrier(groups.world)
        return drawn

    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    drawn = in_threads(body)
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0][0] != drawn[0][1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_ranks_that_wait_for_each_other_are_told():
    def body(groups):
        if groups.rank == 0:
            c.all_reduce_(torch.ones(2), groups.world)
        elif groups.rank == 1:
            dist.recv(torch.ones(3), group=groups.world, group_src=2)

    with pytest.raises(RuntimeError, match="the ranks wait for each other, and would hang") as caught:
        in_threads(body)
    text = str(caught.value)
    assert "rank 0 (pipeline rank 0, replica 0, tensor rank 0) for an all-reduce of (2,) float32 over the world" in text
    assert "tensor rank 1) for message 0 of rank 2, (3,) float32" in text


def test_collectives_that_do_not_match_are_told():
    def body(groups):
        c.all_reduce_(torch.ones(2 + groups.rank // 2), groups.tensor)

    with pytest.raises(RuntimeError, match=r"rank 0 an all-reduce of \(2,\) float32, rank 2 an all-reduce of \(3,\)"):
        in_threads(body)


def test_first_failure_ends_all_ranks():
    ended = []

    def body(groups):
        try:
            {0: 0, 2: 2}[groups.rank]
            c.barrier(groups.world)
        except Exception:
            ended.append(("caught", groups.rank))
            raise
        finally:
            ended.append(groups.rank)

    threads = threading.active_count()
    world = InProcessWorld(THREE)
    with pytest.raises(KeyError, match="1"):
        world.run(body)
    assert world.failed_rank == 1
    assert sorted(map(str, ended)) == ["('caught', 1)", "0", "1"]  # rank 2 had not begun
    assert threading.active_count() == threads


def place_of_two(ranks):
    return rank_in(dist.group.WORLD, 1), ranks


def test_place_in_a_group_of_processes_is_torchs():
    assert run_spmd(place_of_two, 2, ranks=0) == [(1, 0), (1, 0)]
