"""What each operation counts for."""

import torch
import torch.distributed as dist

from benchmarks.traffic import Traffic
from lightning_ptdp.comm import collectives as c
from tests.spmd import spmd


@spmd(world_size=3)
def test_each_operation_counts_as_its_ring():
    world, rank, x = dist.group.WORLD, dist.get_rank(), torch.ones(6, 2)
    with Traffic() as traffic:
        c.all_reduce_(x, world)
        c.all_gather_dim(x, world, 0, 18)
        c.reduce_scatter_dim(x, world, 0)
        c.broadcast_(x, 1, world)
        c.barrier(world)
        (dist.send(x, 1) if rank == 0 else dist.recv(x, 0)) if rank < 2 else None
    found = {kind.operation: count for kind, count in traffic.sent.items()}
    assert {name: found[name] for name in ("all_reduce", "all_gather", "reduce_scatter")} == {
        "all_reduce": 16,
        "all_gather": 24,
        "reduce_scatter": 8,
    }
    assert found.get("broadcast", 0) == (12 if rank == 1 else 0)
    assert found.get("send", 0) == (12 if rank == 0 else 0)
    assert traffic.elements(group=world, dtype=torch.float32) == sum(found.values())
    c.all_reduce_(x, world)
    assert traffic.elements(operation="all_reduce") == 16, "nothing is counted outside"


@spmd(world_size=2)
def test_backward_is_counted_too():
    x = torch.ones(4, requires_grad=True)
    with Traffic() as traffic:
        c.copy_to(x, dist.group.WORLD).sum().backward()
    assert traffic.elements() == 4
