"""Batch norms that train on microbatches are named."""

import pytest
from torch import nn

from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.preflight.refusals import batch_norm_warning
from lightning_ptdp.topology import Topology

NET = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for i in range(6)})


@pytest.mark.parametrize(
    ("pipeline_parallel_size", "micro_batch_size"), [(2, "auto"), (1, 4)], ids=["pipeline", "microbatches"]
)
def test_batch_norms_of_microbatches_are_named(pipeline_parallel_size, micro_batch_size):
    config = ParallelConfig(micro_batch_size=micro_batch_size)
    warning = batch_norm_warning(NET, Topology(1, pipeline_parallel_size, 1), config)
    assert warning.startswith("the statistics of '0.1', '1.1', '2.1', '3.1' and 2 more (6 batch norms) are those of a")
    assert "use LayerNorm or GroupNorm, or micro_batch_size=" in warning


def test_batch_norms_of_whole_batches_are_not():
    assert batch_norm_warning(NET, Topology(1, 1, 2), ParallelConfig()) is None
    assert batch_norm_warning(nn.LayerNorm(2), Topology(1, 2, 1), ParallelConfig()) is None
