"""Every process group of a run, created in one place.

    mesh [p, d, t]     pipeline axis reversed: global rank 0 is on the last pipeline rank

    tensor      t ranks that share each matrix          (innermost: inside a node)
    data        d replicas of one shard
    pipeline    p ranks from the first stage to the last
    replica     t * p ranks that together hold the model once
    ends        the first and the last pipeline rank, which share tied embeddings

Ranks of a group are named by global rank; a rank's own position comes from :class:`Topology`, never from a mesh,
because a reversed axis makes a mesh's local ranks disagree with its coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_ptdp.topology import Coordinate, Topology

AXES = ("pipeline", "data", "tensor")


def backend_for(device: torch.device, asked: str | None) -> str:
    """Choose the backend of a run's groups: gloo on CPUs; on GPUs NCCL, or what was asked for, with gloo for the host.

    Small control messages stay on the host.
    """
    if device.type != "cuda":
        return asked or "gloo"
    backend = asked or "nccl"
    return backend if "gloo" in backend else f"cpu:gloo,cuda:{backend}"


def join_world(backend: str, *, address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> None:
    """Create the default process group, unless there is one already.

    Args:
        backend: such as "nccl" or "gloo".
        address: of the machine on which global rank 0 listens.
        port: on which it listens.
        rank: global rank of this process.
        world_size: number of all processes.
        timeout: after which a collective fails.
    """
    if dist.is_initialized():
        return
    host = f"[{address}]" if ":" in address else address
    dist.init_process_group(
        backend, init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size, timeout=timeout
    )


def world() -> ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "join_world was called"
    return group


def world_copy() -> ProcessGroup:
    """Make another group of all ranks, on the host, for messages beside those of the world; all ranks call it."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, ProcessGroup), "every rank belongs to it"
    return group


@dataclass(frozen=True)
class Groups:
    """The groups that this rank belongs to, and where it stands in them."""

    topology: Topology
    rank: int
    mesh: DeviceMesh | None = field(repr=False)
    tensor: ProcessGroup = field(repr=False)
    data: ProcessGroup = field(repr=False)
    pipeline: ProcessGroup = field(repr=False)
    replica: ProcessGroup = field(repr=False)
    ends: ProcessGroup | None = field(repr=False)
    world: ProcessGroup = field(repr=False)

    @classmethod
    def create(cls, topology: Topology, device_type: str) -> Groups:
        """Create all groups; every rank of the world must call this.

        Raises:
            ValueError: the world does not have t * p * d ranks.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if world_size != topology.world_size:
            raise ValueError(f"the topology has t * p * d = {topology.world_size} ranks, the world {world_size}")
        t, p, d = topology.tensor_parallel_size, topology.pipeline_parallel_size, topology.data_parallel_size
        ranks = torch.arange(world_size).view(p, d, t).flip(0)
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
        return cls(
            topology=topology,
            rank=rank,
            mesh=mesh,
            tensor=mesh.get_group("tensor"),
            data=mesh.get_group("data"),
            pipeline=mesh.get_group("pipeline"),
            replica=_replica_group(topology, rank),
            ends=_ends_group(topology, rank),
            world=world(),
        )

    @property
    def at(self) -> Coordinate:
        """This rank's position."""
        return self.topology.coordinate(self.rank)

    @property
    def is_first_pipeline_rank(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.at.pipeline == 0

    @property
    def is_last_pipeline_rank(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.at.pipeline == self.topology.pipeline_parallel_size - 1

    @property
    def pipeline_ranks(self) -> list[int]:
        """Global ranks of this rank's pipeline, from the first stage to the last."""
        return self.topology.pipeline_ranks(self.at)

    def destroy(self) -> None:
        """Destroy the groups that `create` made; the world stays."""
        for group in {self.tensor, self.data, self.pipeline, self.replica, self.ends}:
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _replica_group(topology: Topology, rank: int) -> ProcessGroup:
    mine = None
    for data in range(topology.data_parallel_size):
        ranks = topology.replica_ranks(Coordinate(0, data, 0))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    assert isinstance(mine, ProcessGroup), "every rank belongs to one replica"
    return mine


def _ends_group(topology: Topology, rank: int) -> ProcessGroup | None:
    """The group of the first and last pipeline rank; None on the ranks between them."""
    mine = None
    for data in range(topology.data_parallel_size):
        for tensor in range(topology.tensor_parallel_size):
            line = topology.pipeline_ranks(Coordinate(tensor, data, 0))
            ranks = sorted({line[0], line[-1]})
            group = dist.new_group(ranks)
            if rank in ranks:
                mine = group
    return mine
