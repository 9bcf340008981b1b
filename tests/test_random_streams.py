"""Streams agree where the table of `random` says so, and differ where it says so."""

import random

import numpy
import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.random_streams import RandomStreams, SplitRegion, align_random_state, mix
from tests.spmd import run_spmd, spmd

CPU = torch.device("cpu")


def draws():
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def test_mix_gives_63_bits():
    assert all(0 <= mix(i, -i) < 1 << 63 for i in range(1000))
    assert len({mix(i, k) for i in range(100) for k in range(100)}) == 10_000


def test_order_and_number_of_numbers_count():
    assert len({mix(1, 2), mix(2, 1), mix(1, 2, 0), mix(0, 1, 2), mix(1), mix(2), mix(3), mix()}) == 8


@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_bit_of_a_number_changes_about_half_of_the_bits(place):
    base, changed = [1234, 5, 6], []
    for bit in range(63):
        other = list(base)
        other[place] ^= 1 << bit
        changed.append((mix(*base) ^ mix(*other)).bit_count())
    assert 29 < sum(changed) / len(changed) < 34
    assert min(changed) > 10


def test_stream_before_the_model_is_of_step_replica_and_microbatch():
    seen = {}
    for position in [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0)]:
        for seed in (1, 2):
            streams = RandomStreams(seed, CPU)
            with streams.isolated():
                streams.start(*position)
                seen[seed, position] = draws()
                streams.start(*position)
                assert draws() == seen[seed, position]
    assert len(set(seen.values())) == 10


def test_stream_in_a_stage_is_of_the_stage_and_forgets_what_was_drawn_before():
    streams, seen = RandomStreams(1, CPU), []
    with streams.isolated():
        for num_before in (0, 5):
            for stage in (0, 1, 2):
                streams.start(0, 0, 0, 0)
                before = torch.rand(num_before + 1)
                streams.enter_stage(stage)
                seen.append(torch.rand(()).item())
                assert seen[-1] != before[0].item()
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3


def test_isolated_restores_all_generators_after_an_error_too():
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    streams = RandomStreams(1, CPU)
    with pytest.raises(ZeroDivisionError):
        draw_and_fail(streams)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), before[2], strict=True))


def draw_and_fail(streams):
    with streams.isolated():
        streams.start(0, 0, 0, 0)
        draws()
        raise ZeroDivisionError


def in_region(rank, *, enters=1):
    """What a peer draws in a split region, and after it."""
    torch.manual_seed(3)
    region = SplitRegion(rank, CPU)
    for _ in range(enters):
        region.enter()
    inside = torch.rand(()).item()
    region.leave()
    after = torch.rand(()).item()
    region.leave()  # of what was left: nothing happens
    return inside, after, torch.rand(()).item()


def test_peers_draw_apart_in_a_split_region_and_alike_after_it():
    found = [in_region(rank) for rank in range(4)]
    assert len({inside for inside, _, _ in found}) == 4
    assert len({after for _, *after in found for after in after}) == 2, "the next two of the shared stream"


def test_region_repeats_when_the_shared_stream_does():
    assert in_region(1) == in_region(1) == in_region(1, enters=3)


def test_two_regions_draw_apart():
    torch.manual_seed(3)
    region, seen = SplitRegion(0, CPU), []
    for _ in range(2):
        region.enter()
        seen.append(torch.rand(()).item())
        region.leave()
    assert seen[0] != seen[1]


def seeded_apart():
    """The next draws of ranks that were seeded differently, after they share rank 0's state."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(10 + dist.get_rank())
    align_random_state(CPU, dist.group.WORLD)
    return draws()


def test_shared_state_is_that_of_rank_0():
    torch.manual_seed(10)
    random.seed(10)
    numpy.random.seed(10)
    assert run_spmd(seeded_apart, world_size=2) == [draws()] * 2


@spmd(world_size=2)
def test_draws_in_a_region_need_no_message():
    if dist.get_rank() == 0:
        in_region(0)
