"""Tensor peers find the whole weights on whose gradients they disagree."""

import torch
import torch.distributed as dist

from lightning_ptdp.tensor_parallel.agreement import disagreements
from tests.spmd import run_spmd, spmd


def gradients(**offsets):
    """The same on all peers, but for a part of its norm by rank."""
    found = {}
    for name in ("norm", "bias", "token"):
        base = torch.arange(1.0, 9.0)
        found[name] = base * (1 + offsets.get(name, 0.0) * dist.get_rank())
    return found


def named(**offsets):
    return disagreements(gradients(**offsets), dist.group.WORLD)


def test_only_what_differs_is_named_and_on_every_peer():
    assert run_spmd(named, world_size=2, norm=0.5) == [["norm"]] * 2
    assert run_spmd(named, world_size=2, norm=0.5, token=-1.0) == [["norm", "token"]] * 2
    assert run_spmd(named, world_size=2) == [[]] * 2


@spmd(world_size=2)
def test_rounding_is_no_disagreement():
    assert named(norm=1e-3) == []


@spmd(world_size=2)
def test_gradients_of_one_norm_and_other_direction_differ():
    sign = 1.0 if dist.get_rank() == 0 else -1.0
    assert disagreements({"norm": torch.ones(4) * sign}, dist.group.WORLD) == ["norm"]


@spmd(world_size=2)
def test_gradients_that_are_next_to_nothing_are_left_out():
    """A bias of keys has the gradient 0, of which only rounding is left."""
    found = {"norm": torch.ones(4), "key.bias": torch.full((4,), 1e-9 * (1 + dist.get_rank()))}
    assert disagreements(found, dist.group.WORLD) == []


@spmd(world_size=1)
def test_lone_rank_agrees():
    assert named(norm=1.0) == []


@spmd(world_size=2)
def test_no_gradients_agree():
    assert disagreements({}, dist.group.WORLD) == []
    assert disagreements({"a": torch.zeros(3)}, dist.group.WORLD) == []
