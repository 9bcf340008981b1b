"""Each pair's forward and backward against autograd on the whole, in one process."""

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.comm import collectives as c
from tests.spmd import run_spmd, spmd

LENGTHS = [4, 5, 2, 1, 0]  # over three ranks: some uneven, some with empty pieces


def world():
    return dist.group.WORLD


def whole(length, dim, seed=0):
    """The same tensor on every rank, `length` along `dim`."""
    shape = [2, 2]
    shape[dim] = length
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pieces(tensor, dim):
    """What each rank holds of a whole, by the definition of torch.chunk."""
    found = list(tensor.chunk(dist.get_world_size(), dim)) if tensor.shape[dim] else []
    return found + [tensor.narrow(dim, 0, 0)] * (dist.get_world_size() - len(found))


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("length", "parts"), [(61, 4), (5, 3), (4, 3), (2, 3), (1, 4), (0, 2), (8, 4)])
def test_chunk_sizes_are_those_of_torch_chunk(length, parts):
    expected = [len(piece) for piece in torch.zeros(length).chunk(parts)] if length else []
    assert c.chunk_sizes(length, parts) == expected + [0] * (parts - len(expected))


@spmd(world_size=3)
def test_copy_to_sums_the_gradients_of_split_computation():
    x, rank = whole(4, 0).requires_grad_(), dist.get_rank()
    y = c.copy_to(x, world())
    near(y, x)
    (y * whole(4, 0, seed=1 + rank)).sum().backward()
    near(x.grad, sum(whole(4, 0, seed=1 + r) for r in range(3)))


@spmd(world_size=3)
def test_reduce_from_sums_partial_results_and_passes_the_gradient():
    x = whole(4, 0, seed=dist.get_rank()).requires_grad_()
    before = x.detach().clone()
    y = c.reduce_from(x, world())
    near(y, sum(whole(4, 0, seed=r) for r in range(3)))
    (y * whole(4, 0, seed=9)).sum().backward()
    near(x.grad, whole(4, 0, seed=9))
    near(x.detach(), before)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("length", LENGTHS)
@spmd(world_size=3)
def test_gather_from_joins_pieces_and_slices_the_gradient(length, dim):
    rank, factor = dist.get_rank(), whole(length, dim, seed=9)
    x = pieces(whole(length, dim), dim)[rank].clone().requires_grad_()
    y = c.gather_from(x, world(), dim, length)
    near(y, whole(length, dim))
    (y * factor).sum().backward()
    near(x.grad, pieces(factor, dim)[rank])


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("length", LENGTHS)
@spmd(world_size=3)
def test_scatter_to_slices_and_joins_the_gradient(length, dim):
    rank, factor = dist.get_rank(), whole(length, dim, seed=9)
    x = whole(length, dim).requires_grad_()
    y = c.scatter_to(x, world(), dim)
    near(y, pieces(whole(length, dim), dim)[rank])
    (y * pieces(factor, dim)[rank]).sum().backward()
    near(x.grad, factor)


@pytest.mark.parametrize("dim", [0, 1])
@spmd(world_size=3)
def test_gather_to_joins_pieces_and_sums_and_scatters_the_gradient(dim):
    rank = dist.get_rank()
    x = pieces(whole(6, dim), dim)[rank].clone().requires_grad_()
    y = c.gather_to(x, world(), dim)
    near(y, whole(6, dim))
    (y * whole(6, dim, seed=1 + rank)).sum().backward()
    near(x.grad, pieces(sum(whole(6, dim, seed=1 + r) for r in range(3)), dim)[rank])


@pytest.mark.parametrize("dim", [0, 1])
@spmd(world_size=3)
def test_reduce_scatter_from_sums_and_scatters_and_joins_the_gradient(dim):
    rank, factor = dist.get_rank(), whole(6, dim, seed=9)
    x = whole(6, dim, seed=rank).requires_grad_()
    y = c.reduce_scatter_from(x, world(), dim)
    near(y, pieces(sum(whole(6, dim, seed=r) for r in range(3)), dim)[rank])
    (y * pieces(factor, dim)[rank]).sum().backward()
    near(x.grad, factor)


@spmd(world_size=1)
def test_group_of_one_rank_returns_its_input():
    x = torch.ones(2, 2)
    assert c.copy_to(x, world()) is x
    assert c.reduce_from(x, world()) is x
    assert c.gather_from(x, world(), 0, 2) is x
    assert c.scatter_to(x, world(), 0) is x
    assert c.gather_to(x, world(), 0) is x
    assert c.reduce_scatter_from(x, world(), 0) is x
    assert c.all_reduce_(x, world()) is x


@pytest.mark.parametrize(
    ("op", "expected"), [("mean", 1.5), ("AVG", 1.5), ("sum", 3.0), ("min", 1.0), ("max", 2.0), (None, 3.0)]
)
@spmd(world_size=2)
def test_reductions_by_name_write_into_nothing(op, expected):
    x = torch.tensor(float(1 + dist.get_rank()))
    assert c.reduce_by_name(x, world(), op).item() == expected
    assert x.item() == 1 + dist.get_rank()


@spmd(world_size=2)
def test_mean_of_whole_numbers_is_no_whole_number():
    assert c.reduce_by_name(torch.tensor(1 + dist.get_rank()), world(), "mean").item() == 1.5


@spmd(world_size=2)
def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduced by mean, sum, min or max; got 'median'"):
        c.reduce_by_name(torch.ones(1), world(), "median")


def objects():
    rank = dist.get_rank()
    return (
        c.broadcast_object({"rank": rank}, 1, world()),
        c.gather_objects(rank, world()),
        c.gather_objects_to(rank, 2, world()),
        c.broadcast_(torch.tensor([float(rank)]), 2, world()).item(),
    )


def test_objects_reach_whom_they_should():
    assert run_spmd(objects, world_size=3) == [
        ({"rank": 1}, [0, 1, 2], None, 2.0),
        ({"rank": 1}, [0, 1, 2], None, 2.0),
        ({"rank": 1}, [0, 1, 2], [0, 1, 2], 2.0),
    ]


@spmd(world_size=2)
def test_average_of_gradients_counts_missing_ones_as_zero():
    p, q, frozen = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    frozen.requires_grad_(False)
    p.grad = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() == 0:
        q.grad = torch.tensor([4.0])
    c.average_gradients([p, q, frozen], {p, q}, world())
    assert (p.grad.item(), q.grad.item(), frozen.grad) == (0.5, 2.0, None)
