"""Batches that are more than one tensor of one shape (PO-13)."""

import pytest
import torch

from tests.models import GPT, texts
from tests.oracle import assert_same, parallel, serial


@pytest.mark.parametrize("p", [2, 4])
def test_masks_positions_and_strings_reach_every_stage(p):
    batches = [texts(4, seed=i, padded=True, extras=True) for i in range(2)]
    run, _ = parallel(GPT, batches, pipeline_parallel_size=p, micro_batch_size=1)
    assert_same(run, serial(GPT, batches))


def test_lengths_may_change_from_batch_to_batch_of_a_window():
    batches = [texts(4, length=length, seed=i) for i, length in enumerate((8, 16, 12, 4, 12, 4, 6, 16))]
    run, _ = parallel(
        GPT, batches, trainer={"accumulate_grad_batches": 4}, pipeline_parallel_size=4, micro_batch_size=1
    )
    one = serial(GPT, batches, accumulate=4)
    assert_same(run, one)
    assert norms(run) == pytest.approx(norms(one), rel=1e-12)  # of sums over a window, where a lost part would show


def norms(run):
    return [float(torch.nn.utils.get_total_norm(step.values())) for step in run.gradients]
