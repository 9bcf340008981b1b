"""Optimizers and gradients that a layout leaves right are not refused: they give the numbers of one process."""

import pytest
from torch import nn, optim

from lightning_ptdp.compat.apex import FusedAdam
from tests.models import GPT, texts
from tests.oracle import assert_same, parallel, serial
from tests.trainer.broken import Lamb
from tests.trainer.test_layouts import PLAN


class OwnAdamW(optim.AdamW):
    """Not known by name, and tried."""


class Optimized(GPT):
    """With an optimizer by name."""

    def configure_optimizers(self):
        kinds = {"Adafactor": optim.Adafactor, "LAMB": Lamb, "own AdamW": OwnAdamW, "FusedAdam": FusedAdam}
        return kinds[self.optimizer_name](self.parameters(), lr=0.01)


class Adafactored(Optimized):
    """With torch's Adafactor."""

    def __init__(self):
        super().__init__(optimizer="Adafactor")


class Lambed(Optimized):
    """With norms of whole parameters."""

    def __init__(self):
        super().__init__(optimizer="LAMB")


class OwnAdamed(Optimized):
    """With a subclass of AdamW."""

    def __init__(self):
        super().__init__(optimizer="own AdamW")


class FusedAdamed(Optimized):
    """With Adam of our kernels."""

    def __init__(self):
        super().__init__(optimizer="FusedAdam")


class SparseGPT(GPT):
    """Its embedding gives sparse gradients."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(64, 32, sparse=True)


class DenseGPT(GPT):
    """Draws the same numbers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(64, 32)


def test_sparse_gradients_are_those_of_dense_ones():
    batches = [texts(4, seed=i) for i in range(2)]
    run, _ = parallel(SparseGPT, batches, pipeline_parallel_size=2, micro_batch_size=2)
    assert_same(run, serial(DenseGPT, batches))


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (Adafactored, {"pipeline_parallel_size": 2}),
        (Lambed, {"pipeline_parallel_size": 2}),
        (OwnAdamed, {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}),
        (FusedAdamed, {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}),
        (FusedAdamed, {"data_parallel_size": 2, "distributed_optimizer": True}),
    ],
)
def test_optimizer_is_allowed_where_the_split_does_not_change_it(make, sizes):
    batches = [texts(4, seed=i) for i in range(3)]
    run, _ = parallel(make, batches, micro_batch_size=2, **sizes)
    one = serial(make, batches)
    if sizes.get("distributed_optimizer"):
        run.gradients, one.gradients = [], []  # a replica has those of its own shard
    assert_same(run, one)
