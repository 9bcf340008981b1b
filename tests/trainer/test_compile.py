"""torch.compile of blocks, of parts and of the network, under every layout, gives the numbers of one process."""

import os
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, assert_same, join, quiet_trainer, serial, train
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}
PIPELINE = {"pipeline_parallel_size": 2}
MAKE = partial(GPT, num_layers=2)
CASES = {
    "blocks, in a pipeline": ("blocks in place", PIPELINE, "inductor"),
    "wrapped blocks, split both ways": ("blocks wrapped", TENSOR | PIPELINE, "eager"),
    "every part, over tensor peers": ("every part", TENSOR, "aot_eager"),
    "blocks that recompute": ("blocks in place", PIPELINE | {"recompute": "full"}, "aot_eager"),
    "wrapped blocks that recompute in pairs": (
        "blocks wrapped",
        TENSOR | {"recompute": "full", "recompute_every": 2},
        "eager",
    ),
    "the network, split both ways": ("the network", TENSOR | PIPELINE, "eager"),
}


class CompiledGPT(GPT):
    """Compiled where the model is built, before the strategy sees it."""

    def __init__(self, what, backend):
        super().__init__(num_layers=2)
        if what == "blocks in place":
            for block in self.blocks:
                block.compile(backend=backend)
        elif what == "blocks wrapped":
            for i, block in enumerate(self.blocks):
                self.blocks[i] = torch.compile(block, backend=backend)
        elif what == "every part":
            for part in (self.token, *self.blocks, self.norm, self.head):
                part.compile(backend=backend)
        else:
            self.compile(backend=backend)


def train_compiled(what, backend, batches, strategy):
    """This rank's part of the run, under plain names, and how many graphs it compiled."""
    in_this_process = patch("torch._inductor.config.compile_threads", 1)
    with warnings.catch_warnings(), patch.dict(os.environ), in_this_process:
        warnings.simplefilter("ignore")  # the compiler's own, of which each release has others
        try:
            part = train(partial(CompiledGPT, what, backend), batches, {}, {"micro_batch_size": 2, **strategy})
            num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        finally:
            torch._dynamo.reset()
    for held in (part.initial, *part.gradients, *part.weights, part.shards):
        for name in list(held):
            held[name.replace("._orig_mod", "")] = held.pop(name)
    return part, num_graphs


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_modules_give_the_numbers_of_one_process(case):
    (what, strategy, backend), batches = CASES[case], [texts(4, seed=i) for i in range(2)]
    sizes = [size for name, size in strategy.items() if name.endswith("_size")]
    ranks = run_spmd(
        train_compiled,
        world_size=2 ** len(sizes),
        timeout=300.0,
        what=what,
        backend=backend,
        batches=batches,
        strategy=strategy,
    )
    assert_same(join([part for part, _ in ranks]), serial(MAKE, batches))
    assert all(num_graphs > 0 for _, num_graphs in ranks)


def test_a_compiled_lightning_module_is_refused_at_once():
    """By Lightning, for every strategy that is not its own."""
    for told in run_spmd(refusal_of_a_compiled_module, world_size=2):
        assert "Using a compiled model is incompatible with the current strategy: `PTDPStrategy`" in told


def refusal_of_a_compiled_module():
    module = torch.compile(GPT(num_layers=1), backend="eager")
    with pytest.raises(RuntimeError, match="compiled model") as caught:
        quiet_trainer(PTDPStrategy()).fit(module, datamodule=ReplicaBatches([texts(2)]))
    return str(caught.value)
