"""Local tensors of every kind of split make up the whole, each element once."""

import itertools

import pytest
import torch

from lightning_ptdp.checkpoint.rectangles import Location
from lightning_ptdp.tensor_parallel.shard import Shard

CASES = {
    "rows": ((6, 3), Shard(0, (6,))),
    "uneven rows": ((5, 3), Shard(0, (5,))),
    "fewer rows than ranks": ((2, 3), Shard(0, (2,))),
    "packed rows": ((12, 3), Shard(0, (4, 4, 4))),
    "packed columns": ((3, 12), Shard(1, (6, 6))),
    "heads": ((3, 24), Shard(1, (12, 6, 6), unit=3)),
    "middle dim": ((2, 7, 3), Shard(1, (7,))),
    "vector": ((6,), Shard(0, (6,))),
    "whole": ((2, 3, 4), None),
    "scalar": ((), None),
    "empty": ((0, 4), None),
}


def locals_of(whole, shard, t):
    """What each tensor rank holds, and its location."""
    if shard is None:
        return [(whole.clone(), Location.whole(tuple(whole.shape)))]
    cuts = [shard.cut(whole, rank, t) for rank in range(t)]
    return [(cut, Location.sharded(tuple(cut.shape), shard, rank, t)) for rank, cut in enumerate(cuts)]


def joined(size, parts):
    whole = torch.full(size, torch.nan)
    for located in parts:
        assert located.size == size
        for rectangle in located.rectangles:
            box = tuple(slice(o, o + n) for o, n in zip(rectangle.offset, rectangle.view.shape, strict=True))
            assert whole[box].isnan().all(), "an element is held twice"
            whole[box] = rectangle.view
    return whole


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_shards_make_up_the_whole(case, t):
    size, shard = CASES[case]
    whole = torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)
    assert torch.equal(joined(size, [location.of(local) for local, location in locals_of(whole, shard, t)]), whole)


@pytest.mark.parametrize("d", [1, 2, 3, 7])
@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_runs_of_flattened_shards_make_up_the_whole(case, t, d):
    size, shard = CASES[case]
    whole = torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)
    parts = []
    for local, location in locals_of(whole, shard, t):
        flat = local.reshape(-1)
        bounds = [i * flat.numel() // d for i in range(d + 1)]
        parts += [location.piece(a, b - a).of(flat[a:b].clone()) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(joined(size, parts), whole)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_takes_its_part_of_the_whole(case):
    size, shard = CASES[case]
    whole = torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)
    for local, location in locals_of(whole, shard, 2):
        taken = torch.full_like(local, torch.nan)
        location.of(taken).take(whole)
        assert torch.equal(taken, local)


def test_run_of_rows_is_one_rectangle():
    location = Location.whole((100, 50))
    assert len(location.piece(7 * 50, 40 * 50).of(torch.zeros(40 * 50)).rectangles) == 1
    assert len(location.piece(7 * 50 - 3, 40 * 50 + 7).of(torch.zeros(40 * 50 + 7)).rectangles) == 3
