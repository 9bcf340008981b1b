"""Where draws must agree they agree, and where they must differ they differ (PO-16)."""

from collections import defaultdict
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.kept import Kept
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, join, parallel, quiet_trainer, serial, train
from tests.spmd import run_spmd

LAYOUTS = [(2, 2, 1), (2, 1, 2)]  # every row of test_layouts.py compares them too


@pytest.mark.parametrize(("p", "v", "d"), LAYOUTS)
def test_initial_weights_have_the_bits_of_one_process(p, v, d):
    make = partial(GPT, tied=True)
    run, _ = parallel(
        make, [texts(4)], pipeline_parallel_size=p, virtual_pipeline_size=v, data_parallel_size=d, micro_batch_size=1
    )
    one = serial(make, [texts(4)])
    assert run.initial.keys() == one.initial.keys()
    assert all(torch.equal(run.initial[name], value) for name, value in one.initial.items())


def test_processes_that_were_not_seeded_alike_take_the_weights_of_rank_0():
    parts = run_spmd(train_from_other_seeds, world_size=2, batches=[texts(4)])
    one = serial(partial(SeededGPT, 10), [texts(4)])
    assert all(torch.equal(join(parts).initial[name], value) for name, value in one.initial.items())


def train_from_other_seeds(batches):
    return train(partial(SeededGPT, 10 + dist.get_rank()), batches, {}, {"pipeline_parallel_size": 2})


class SeededGPT(GPT):
    """Built from a seed of its own."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()


class DrawingBlock(nn.Module):
    """Remembers its dropout masks."""

    def __init__(self, masks):
        super().__init__()
        self.linear, self.masks = nn.Linear(4, 4), masks

    def forward(self, x):
        mask = F.dropout(torch.ones(64), 0.5, training=True)
        self.masks.value.append(tuple(mask.tolist()))
        return self.linear(x) * mask.mean()


class DrawingNet(pl.LightningModule):
    """Draws before the model, and in each of its two blocks. seen: place -> draws in the order of microbatches."""

    def __init__(self):
        super().__init__()
        self.seen = Kept(defaultdict(list))
        self.blocks = nn.ModuleList(DrawingBlock(Kept(self.seen.value[f"block {i}"])) for i in range(2))

    def training_step(self, batch, batch_idx):
        self.seen.value["before the model"].append(tuple(torch.rand(4).tolist()))
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def draws(p):
    """What this rank drew in two steps of two microbatches, where it stands, and its next draw afterwards."""
    seed_everything()
    module = DrawingNet()
    trainer = quiet_trainer(PTDPStrategy(pipeline_parallel_size=p, micro_batch_size=1), use_distributed_sampler=False)
    trainer.fit(module, datamodule=ReplicaBatches([torch.ones(4, 4), torch.ones(4, 4)]))
    at, seen = trainer.strategy.groups.at, module.seen.value
    return at.pipeline, at.data, {place: drawn for place, drawn in seen.items() if drawn}, torch.rand(4).tolist()


def test_stages_draw_alike_before_the_model_and_apart_inside_it():
    results = run_spmd(draws, world_size=4, p=2)
    before, masks = defaultdict(list), []
    for pipeline, replica, seen, _ in results:
        assert sorted(seen) == ["before the model", f"block {pipeline}"]
        before[replica].append(seen["before the model"])
        masks += seen[f"block {pipeline}"]
    for of_stages in before.values():
        assert of_stages[0] == of_stages[1]
        assert len(of_stages[0]) == 4, "two steps of two microbatches"
    assert len({draw for of_stages in before.values() for draw in of_stages[0]}) == 8, "no two microbatches draw alike"
    assert len(set(masks)) == len(masks) == 16, "no two blocks, replicas, microbatches or steps have the same mask"


def test_run_repeats_its_draws():
    assert run_spmd(draws, world_size=2, p=2) == run_spmd(draws, world_size=2, p=2)


def test_default_generators_agree_after_training():
    after = [next_draw for _, _, _, next_draw in run_spmd(draws, world_size=4, p=2)]
    assert after == [after[0]] * 4
