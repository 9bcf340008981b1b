import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ptdp.data_parallel.buckets import GradientBuffers
from lightning_ptdp.data_parallel.main_weights import MainWeights
from tests.spmd import run_spmd


def parameters(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def collect(buffers, *losses):
    with buffers.collect():
        for loss in losses:
            loss.backward()


def test_gradients_wait_in_the_buffer_until_they_are_published():
    (p,) = parameters(3)
    buffers = GradientBuffers([p])
    collect(buffers, (2 * p).sum(), (3 * p).sum())
    assert p.grad is None, "zero_grad comes next, and would erase it"
    buffers.finish_batch(0.5, is_first=True, is_only=True)
    MainWeights(buffers, None).publish()
    assert p.grad.tolist() == [2.5] * 3


def test_parameter_that_got_no_gradient_has_none():
    p, q = parameters(3, 2)
    buffers = GradientBuffers([p, q])
    collect(buffers, p.sum())
    buffers.finish_batch(1.0, is_first=True, is_only=True)
    MainWeights(buffers, None).publish()
    assert p.grad.tolist() == [1.0] * 3
    assert q.grad is None


def test_batches_of_a_window_add_up_with_their_own_factors():
    (p,) = parameters(2)
    buffers = GradientBuffers([p])
    for window in range(3):
        for i, factor in enumerate((1.0, 10.0, 100.0)):
            collect(buffers, (window + 1) * p.sum())
            buffers.finish_batch(factor, is_first=i == 0, is_only=False)
        MainWeights(buffers, None).publish()
        assert p.grad.tolist() == [111.0 * (window + 1)] * 2


def test_windows_of_one_and_of_several_batches_may_follow_each_other():
    (p,) = parameters(2)
    buffers = GradientBuffers([p])
    for sizes in (1, 2, 1, 1, 3):
        for i in range(sizes):
            collect(buffers, p.sum())
            buffers.finish_batch(1.0, is_first=i == 0, is_only=sizes == 1)
        MainWeights(buffers, None).publish()
        assert p.grad.tolist() == [float(sizes)] * 2


def test_gradient_of_one_batch_of_a_window_stays_where_another_has_none():
    p, q = parameters(2, 2)
    buffers = GradientBuffers([p, q])
    collect(buffers, p.sum())
    buffers.finish_batch(1.0, is_first=True, is_only=False)
    collect(buffers, q.sum())
    buffers.finish_batch(1.0, is_first=False, is_only=False)
    MainWeights(buffers, None).publish()
    assert (p.grad.tolist(), q.grad.tolist()) == ([1.0, 1.0], [1.0, 1.0])


def test_narrow_gradients_add_up_in_float32():
    """In bfloat16 256 + 1 is 256."""
    (p,) = parameters(1, dtype=torch.bfloat16)
    buffers = GradientBuffers([p])
    collect(buffers, (256 * p).sum(), *(p.sum() for _ in range(8)))
    buffers.finish_batch(1.0, is_first=True, is_only=True)
    assert buffers.gradient(p).dtype == torch.float32
    assert buffers.gradient(p).item() == 264.0
    mains = MainWeights(buffers, None)
    mains.publish()
    assert p.grad is None
    assert mains.weight_of(p).grad.dtype == torch.float32


def test_wide_gradients_stay_wide():
    (p,) = parameters(1, dtype=torch.float64)
    assert GradientBuffers([p]).view(p).dtype == torch.float64


def test_views_do_not_overlap_and_have_the_shape_of_their_parameter():
    ps = parameters((3, 5), (33,), (1,), (2, 2, 2))
    buffers = GradientBuffers(ps)
    for number, p in enumerate(ps):
        buffers.view(p).fill_(number)
    for number, p in enumerate(ps):
        assert buffers.view(p).shape == p.shape
        assert buffers.view(p).unique().tolist() == [number]


def test_batch_without_any_microbatch_is_a_zero_step():
    (p,) = parameters(2)
    buffers = GradientBuffers([p])
    collect(buffers, p.sum())
    buffers.finish_batch(1.0, is_first=True, is_only=True)
    collect(buffers)
    buffers.finish_batch(0.0, is_first=True, is_only=True)
    assert buffers.view(p).tolist() == [0.0, 0.0]


def test_sparse_gradients_are_taken_dense():
    table = nn.Embedding(4, 2, sparse=True)
    buffers = GradientBuffers([table.weight])
    collect(buffers, table(torch.tensor([1, 1])).sum())
    buffers.finish_batch(1.0, is_first=True, is_only=True)
    assert buffers.gradient(table.weight).tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def test_released_buffers_leave_later_gradients_alone():
    (p,) = parameters(2)
    buffers = GradientBuffers([p])
    buffers.release()
    p.sum().backward()
    assert p.grad.tolist() == [1.0, 1.0]


def reduced(touched_on):
    """The gradient of each of two parameters, where each rank touches only some."""
    ps = parameters(2, 3)
    buffers = GradientBuffers(ps)
    collect(buffers, *((dist.get_rank() + 1) * p.sum() for p, on in zip(ps, touched_on, strict=True) if rank_in(on)))
    buffers.finish_batch(1.0, is_first=True, is_only=True)
    buffers.reduce(dist.group.WORLD)
    MainWeights(buffers, None).publish()
    return [None if p.grad is None else p.grad.tolist() for p in ps]


def rank_in(ranks):
    return dist.get_rank() in ranks


@pytest.mark.parametrize(
    ("touched_on", "expected"),
    [
        (([0, 1], [0, 1]), [[3.0] * 2, [3.0] * 3]),
        (([0], [0, 1]), [[1.0] * 2, [3.0] * 3]),
        (([1], []), [[2.0] * 2, None]),
    ],
)
def test_replicas_sum_and_agree_on_what_has_a_gradient(touched_on, expected):
    assert run_spmd(reduced, world_size=2, touched_on=touched_on) == [expected, expected]
