"""What a step may do besides giving a loss: skip batches, use parts of the model, move buffers, talk to other ranks."""

import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, points, texts
from tests.oracle import ReplicaBatches, assert_same, parallel, quiet_trainer, serial, whole_state
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN
from tests.trainer.test_manual_optimization import LAYOUTS, ByHand, assert_as_in_one_process

# -- steps that are skipped ----------------------------------------------------------------------------------------


class Choosy(GPT):
    """Leaves out the batches of some numbers, or the rows that begin with a word of some."""

    def __init__(self, skipped, by_rows=False, **options):
        super().__init__(optimizer="adamw", lr=0.01, **options)
        self.skipped, self.by_rows = skipped, by_rows

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.by_rows:
            return None if int(batch["ids"][0, 0]) in self.skipped else {"loss": loss, "word": batch["ids"][:, 0]}
        return None if batch_idx in self.skipped else loss


SKIPS = {
    "first": {"skipped": (0,)},
    "in a window": {"skipped": (0, 3), "accumulate": 2},
    "all, clipped": {"skipped": (0, 1, 2, 3), "accumulate": 2, "clip": 0.1},
}


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", SKIPS)
def test_a_skipped_batch_changes_nothing(name, layout):
    case, (t, p, d) = dict(SKIPS[name]), layout
    accumulate, clip = case.pop("accumulate", 1), case.pop("clip", None)
    make, batches = partial(Choosy, **case), [texts(4, seed=i) for i in range(4)]
    trainer = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "callbacks": [Ends()]}
    options = {"tensor_parallel_plan": PLAN} if t > 1 else {}
    runs = run_spmd(
        weights_after,
        world_size=t * p * d,
        make=make,
        batches=batches,
        trainer=trainer,
        strategy={"tensor_parallel_size": t, "pipeline_parallel_size": p, "data_parallel_size": d, **options},
    )
    one = run_spmd(weights_after, world_size=1, make=make, batches=batches, trainer=trainer, strategy=None)
    torch.testing.assert_close(runs[0], one[0], rtol=0.0, atol=1e-10)


class Ends(pl.Callback):
    """Keeps the whole weights at the end."""

    def on_train_end(self, trainer, pl_module):
        self.weights = {n: w.clone() for n, w in whole_state(trainer).items()}


def weights_after(make, batches, trainer, strategy):
    end = trainer["callbacks"][0]
    chosen = "auto" if strategy is None else PTDPStrategy(**strategy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".training_step. returned .None.")  # Lightning's, once a process
        quiet_trainer(chosen, precision="64-true", use_distributed_sampler=False, **trainer).fit(
            make(), datamodule=ReplicaBatches(batches)
        )
    return end.weights


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_rows_left_out_do_not_count(layout):
    """A microbatch of one row each; where rows are left out, the rest is the batch."""
    batches = [texts(4, seed=i) for i in range(3)]
    words = [int(batches[0]["ids"][1, 0]), *batches[1]["ids"][:2, 0].tolist()]
    run, _ = parallel(partial(Choosy, words, by_rows=True), batches, micro_batch_size=1, **layout)
    kept = [
        {name: value[[int(row[0]) not in words for row in batch["ids"]]] for name, value in batch.items()}
        for batch in batches
    ]
    assert len(kept[0]["ids"]) < 4
    assert_same(run, serial(partial(Choosy, ()), kept))


# -- parts of the model that a step does not use -------------------------------------------------------------------


class Forked(pl.LightningModule):
    """Uses one of two heads by turns, and never a third."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.heads[batch_idx % 2](torch.tanh(self.body(batch["x"])))[:, 0], batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_unused_parameters_have_no_gradient():
    batches = [points(4, seed=i) for i in range(4)]
    run, _ = parallel(Forked, batches, data_parallel_size=2)
    assert [sorted(gradients)[2:] for gradients in run.gradients[:2]] == [
        ["heads.0.bias", "heads.0.weight"],
        ["heads.1.bias", "heads.1.weight"],
    ]
    assert_same(run, serial(Forked, batches))


# -- buffers that training moves -----------------------------------------------------------------------------------


class Normed(pl.LightningModule):
    """With batch norms; the loss compares every sample with the batch's."""

    def __init__(self, *, norm=nn.BatchNorm1d, **options):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm, self.plain = norm(8, **options), norm(8, affine=False, momentum=None)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch["x"])
        x = self.norm(x.unflatten(0, (-1, 1)).expand(-1, 3, -1).mT * torch.tensor([1.0, 2.0, 3.0])).mean(-1)
        return F.mse_loss(self.head(torch.tanh(self.plain(x)))[:, 0], batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NormedByHand(Normed):
    """Steps by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("rows", [8, 7], ids=["equal replicas", "unequal replicas"])
def test_synchronized_batch_norms_see_the_batch_of_one_process(rows):
    batches, trainer = [points(rows, seed=i) for i in range(3)], {"sync_batchnorm": True, "callbacks": [Ends()]}
    make = partial(Normed, eps=1e-3)
    run, _ = parallel(make, batches, data_parallel_size=2, trainer={"sync_batchnorm": True})
    assert_same(run, serial(make, batches))
    runs = run_spmd(weights_after, world_size=2, make=make, batches=batches, trainer=trainer, strategy={})
    one = run_spmd(weights_after, world_size=1, make=make, batches=batches, trainer=trainer, strategy=None)
    torch.testing.assert_close(runs[0], one[0], rtol=0.0, atol=1e-10)  # running statistics too


@pytest.mark.parametrize("make", [NormedByHand, partial(Normed, norm=nn.SyncBatchNorm)], ids=["by hand", "torch's own"])
def test_batch_norms_are_synchronized_however_it_is_asked_for(make):
    norms = run_spmd(end_of_norms, world_size=2, make=make, synced=make is NormedByHand)
    one = run_spmd(end_of_norms, world_size=1, make=NormedByHand, synced=False)[0]
    for mine in norms:
        torch.testing.assert_close(mine["norm.running_var"], one["norm.running_var"], rtol=0.0, atol=1e-10)
    assert norms[0].keys() == one.keys()


def end_of_norms(make, synced):
    """The buffers of this rank after training."""
    module = make()
    quiet_trainer(PTDPStrategy(), precision="64-true", sync_batchnorm=synced, use_distributed_sampler=False).fit(
        module, datamodule=ReplicaBatches([points(8, seed=i) for i in range(3)])
    )
    assert type(module.norm) in (nn.BatchNorm1d, nn.SyncBatchNorm), "the run left a class of its own"
    return dict(module.named_buffers())


def test_without_it_replicas_keep_the_statistics_of_the_first():
    """As under DDP: those of one process that saw the first replica's half."""
    norms = run_spmd(end_of_norms, world_size=2, make=Normed, synced=False)
    assert norms[0].keys() == norms[1].keys()
    for name, value in norms[0].items():
        assert torch.equal(value, norms[1][name]), name
    assert norms[0]["norm.num_batches_tracked"] == 3


# -- words with other ranks ----------------------------------------------------------------------------------------


class Talker(ByHand):
    """Gathers, reduces and broadcasts between its losses."""

    def plainly(self, loss, batch, batch_idx):
        super().plainly(loss, batch, batch_idx)
        strategy = self.trainer.strategy
        rows = self.all_gather(batch["ids"][:, 0]).flatten()
        self.log("rows", rows.double().square().sum())
        self.log("reduced", strategy.reduce(batch["ids"].double().mean(), reduce_op="mean"))
        self.log("summed", strategy.reduce(torch.tensor(float(len(batch["ids"]))), reduce_op="sum"))
        self.log("broadcast", float(strategy.broadcast(batch["ids"][0, 0].item() if batch_idx == 0 else 5.0)))
        strategy.barrier("here")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_can_talk_in_a_step(layout):
    batches = [texts(4, seed=i) for i in range(2)]
    assert_as_in_one_process(partial(Talker, "plainly"), batches, *LAYOUTS[layout], PLAN)
