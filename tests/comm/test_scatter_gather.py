"""Parts of what peers hold alike, and what they do where they don't."""

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.comm.scatter_gather import ScatterGather
from tests.spmd import spmd

CPU = torch.device("cpu")


def tensor_peers():
    return ScatterGather(dist.group.WORLD, dist.group.WORLD)


@spmd(world_size=2)
def test_only_the_same_bits_of_a_length_that_divides_are_alike():
    rank = dist.get_rank()
    tensors = {
        "the same": torch.arange(6.0),
        "another shape of memory": torch.arange(6.0).view(2, 3).t(),
        "16 bits, not a number": torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16),
        "a rounding apart": torch.tensor([1.0, 1.0 + rank * 2**-23]),
        "odd": torch.arange(3.0),
        "whole numbers": torch.arange(4),
        "a number": torch.tensor(1.0),
        "zeros of two signs": torch.tensor([0.0, -0.0 if rank else 0.0]),
    }
    assert tensor_peers().alike(tuple(tensors.values())) == (True, True, True, False, False, False, False, False)


@spmd(world_size=3)
def test_parts_make_the_whole_again():
    whole, peers = torch.arange(12.0).view(3, 4).t(), tensor_peers()
    part = peers.part(whole, "it")
    assert part.untyped_storage().nbytes() == 16
    assert peers.like_part((4, 3), torch.float32, CPU).shape == part.shape
    assert torch.equal(peers.join(part, (4, 3)), whole)
    peers.check()


@pytest.mark.parametrize(
    ("mine", "is_off"), [(1.0, True), (1e-5, False), (float("nan"), True)], ids=["apart", "rounding", "not a number"]
)
@spmd(world_size=2)
def test_check_tells_what_was_shared_out_and_differs(mine, is_off):
    peers = tensor_peers()
    for name, off in (("first", 0.0), ("second", mine if dist.get_rank() else 0.0)):
        peers.part(torch.ones(8) + off, name)
    if is_off:
        with pytest.raises(RuntimeError, match=r"peers hold second in different values.*use scatter_gather=False"):
            peers.check()
    peers.check()
