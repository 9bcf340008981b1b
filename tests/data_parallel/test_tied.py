import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.buckets import GradientBuffers
from lightning_ptdp.data_parallel.tied import SharedGradients, SharedParameter
from lightning_ptdp.topology import Topology
from tests.spmd import run_spmd

CPU = torch.device("cpu")


def summed(owners, touched):
    """The shared gradient on this rank after the sum: a list, None for no gradient, "absent" for no parameter.

    owners, touched: pipeline ranks that hold the parameter, and that give it a gradient of 1 + their number.
    """
    groups = Groups.create(Topology(1, dist.get_world_size(), 1), "cpu")
    stage = groups.at.pipeline
    own, shared = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    holds = stage in owners
    buffers = GradientBuffers([own, shared] if holds else [own])
    with buffers.collect():
        own.sum().backward()
        if stage in touched:
            ((1 + stage) * shared).sum().backward()
    buffers.finish_batch(1.0, is_first=True, is_only=True)
    member = SharedParameter(shared if holds else None, frozenset(owners), (3,), torch.float32)
    SharedGradients([member], groups, CPU).reduce(buffers)
    assert buffers.gradient(own).tolist() == [1.0, 1.0], "the others are left alone"
    gradient = buffers.gradient(shared) if holds else "absent"
    groups.destroy()
    return stage, gradient.tolist() if isinstance(gradient, torch.Tensor) else gradient


def by_stage(**arguments):
    return [gradient for _, gradient in sorted(run_spmd(summed, world_size=3, **arguments), key=lambda pair: pair[0])]


def test_both_ends_get_the_sum():
    assert by_stage(owners=[0, 2], touched=[0, 2]) == [[4.0] * 3, "absent", [4.0] * 3]


def test_end_without_a_gradient_gets_that_of_the_other():
    assert by_stage(owners=[0, 2], touched=[2]) == [[3.0] * 3, "absent", [3.0] * 3]


def test_nobodys_gradient_stays_none():
    assert by_stage(owners=[0, 2], touched=[]) == [None, "absent", None]


def test_every_stage_gets_the_sum_of_what_all_share():
    assert by_stage(owners=[0, 1, 2], touched=[0, 1, 2]) == [[6.0] * 3] * 3


def test_neighbours_may_share_without_the_third():
    assert by_stage(owners=[0, 1], touched=[0, 1]) == [[3.0] * 3, [3.0] * 3, "absent"]
