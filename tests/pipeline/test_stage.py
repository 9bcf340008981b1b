import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.pipeline.partition import partition
from lightning_ptdp.pipeline.skeleton import Payload, Skeleton
from lightning_ptdp.pipeline.stage import StageWorker
from tests.pipeline.runs import PlainRun

CPU = torch.device("cpu")


class Add(nn.Module):
    """Keeps neither its input nor its output for the backward."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.bias


def worker(stage, *, reentrant=None, trains=True, carries=True, detaches=False):
    """The worker of one of two stages, each of one block; the loss is the mean, plus what a head learns.

    carries: whether the first stage trains.
    """
    module = nn.ModuleDict({"blocks": nn.ModuleList([Add(), Add()])})
    skeleton = Skeleton(module, partition(module, 2, split=(1, 1)), (stage,), CPU)

    head = nn.Parameter(torch.zeros(()))

    def step(stage, microbatch):
        x = torch.ones(2, 4) * (microbatch + 1)
        for block in module["blocks"]:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return (x.detach() if detaches else x).mean() + head

    module["blocks"][0].requires_grad_(carries)
    made = StageWorker(skeleton, PlainRun(step), trains=trains, carries=(carries,))
    return made, module["blocks"][stage].bias


def arrived(microbatch=0):
    """What the second stage receives."""
    sent = worker(0)[0].forward(0, microbatch, None)
    return Payload(tuple(t.clone() for t in sent.tensors), sent.structure, sent.others)


def test_output_that_was_sent_is_freed_before_its_backward():
    first, _ = worker(0)
    payload = first.forward(0, 0, None)
    storage = StorageWeakRef(payload.tensors[0].untyped_storage())
    assert not storage.expired()
    del payload
    assert first.num_live == 1
    assert storage.expired()


def test_backward_of_a_freed_output_reaches_the_weights():
    first, bias = worker(0)
    first.forward(0, 0, None)
    assert first.backward(0, 0, (torch.full((2, 4), 0.5),)) == ()
    assert bias.grad.tolist() == [1.0] * 4
    assert first.num_live == 0


def test_last_stage_returns_the_gradient_of_what_it_received():
    last, bias = worker(1)
    assert last.forward(1, 0, arrived()) is None
    (gradient,) = last.backward(1, 0, None)
    assert gradient.tolist() == [[1 / 8] * 4] * 2
    assert bias.grad.tolist() == [2 / 8] * 4


def test_evaluation_keeps_nothing():
    last, _ = worker(1, trains=False)
    with torch.no_grad():
        last.forward(1, 0, arrived())
    assert last.num_live == 0


def test_checkpoint_without_reentry_is_allowed():
    last, bias = worker(1, reentrant=False)
    last.forward(1, 0, arrived())
    (gradient,) = last.backward(1, 0, None)
    assert gradient.tolist() == [[1 / 8] * 4] * 2
    assert bias.grad.tolist() == [2 / 8] * 4


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoint_with_reentry_around_a_block_is_an_error_with_a_way_out(stage):
    made, _ = worker(stage, reentrant=True)
    with pytest.raises(RuntimeError, match=r"block 0 of 'blocks' ran without a graph.*use_reentrant=False"):
        made.forward(stage, 0, arrived() if stage else None)


def test_loss_that_ignores_the_blocks_is_an_error_with_a_way_out():
    last, _ = worker(1, detaches=True)
    last.forward(1, 0, arrived())
    with pytest.raises(RuntimeError, match=r"no gradient reached the activation that stage 1 .*pipeline_parallel_size"):
        last.backward(1, 0, None)


def test_microbatch_that_does_not_count_sends_zeros_back():
    last, bias = worker(1)
    last._run.take = lambda k, loss: None
    last.forward(1, 0, arrived())
    (gradient,) = last.backward(1, 0, None)
    assert gradient.tolist() == [[0.0] * 4] * 2
    assert bias.grad is None


def test_frozen_stage_is_not_differentiated():
    first, bias = worker(0, carries=False)
    first.forward(0, 0, None)
    assert first.backward(0, 0, None) == ()
    assert bias.grad is None
    assert first.num_live == 0


def test_stage_above_a_frozen_one_computes_no_gradient_for_it():
    last, bias = worker(1, carries=False)
    received = arrived()
    last.forward(1, 0, received)
    assert last.backward(1, 0, None) == ()
    assert not received.tensors[0].requires_grad
    assert bias.grad.tolist() == [2 / 8] * 4
