"""Where shards lie in the whole, against `torch.chunk`."""

import pytest
import torch

from lightning_ptdp.tensor_parallel.shard import Piece, Shard

SIZES = range(1, 9)  # tensor peers


def cuts(shard, whole, size):
    return [shard.cut(whole, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_cuts_are_those_of_torch_chunk(size):
    for length in range(1, 71):
        whole = torch.arange(length)
        chunks = list(whole.chunk(size))
        chunks += [whole[:0]] * (size - len(chunks))
        for mine, theirs in zip(cuts(Shard(0, (length,)), whole, size), chunks, strict=True):
            assert torch.equal(mine, theirs), f"{length} elements on {size} peers"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_joined_cuts_are_the_whole(dim, size):
    for length in range(1, 71):
        whole = torch.arange(2.0 * length).view(2, length).movedim(1, dim)
        shard = Shard(dim, (length,))
        assert torch.equal(shard.join(cuts(shard, whole, size)), whole), f"{length} elements on {size} peers"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sections", "unit"), [((6, 6), 1), ((5, 5, 5), 1), ((12, 4, 4), 2), ((16,), 4), ((7, 3), 1)])
def test_joined_cuts_of_sections_and_units_are_the_whole(sections, unit, size):
    whole = torch.arange(3.0 * sum(sections)).view(3, -1)
    shard = Shard(1, sections, unit)
    locals_ = cuts(shard, whole, size)
    assert torch.equal(shard.join(locals_), whole)
    assert [local.shape[1] for local in locals_] == [shard.local_length(rank, size) for rank in range(size)]


def test_vocabulary_of_61_on_four_peers():
    assert [Shard(0, (61,)).local_length(rank, 4) for rank in range(4)] == [16, 16, 16, 13]


def test_each_section_is_cut_by_itself():
    assert [local.tolist() for local in cuts(Shard(0, (4, 6)), torch.arange(10), 2)] == [
        [0, 1, 4, 5, 6],
        [2, 3, 7, 8, 9],
    ]
    assert Shard(0, (4, 6)).pieces(1, 2) == (Piece(2, 2), Piece(7, 3))


def test_units_stay_together():
    assert [local.tolist() for local in cuts(Shard(0, (9,), 3), torch.arange(9), 2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


def test_cut_is_a_contiguous_copy():
    whole = torch.zeros(2, 4)
    cut = Shard(1, (4,)).cut(whole, 0, 2)
    cut += 1
    assert cut.is_contiguous()
    assert not whole.any()
