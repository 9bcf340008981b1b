"""At p = 1 a step does by hand what it may in one process, and the numbers are those of one process."""

from contextlib import nullcontext
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, points, texts
from tests.oracle import ReplicaBatches, quiet_trainer, whole_state
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN
from tests.trainer.test_tensor_parallel import HeadNormGPT

LAYOUTS = {"replicas": (1, 2), "tensor peers and replicas": (2, 2)}  # t, d


class ByHand(GPT):
    """Steps by hand; how, is told by the name of a method."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.how = how

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss.detach(), sync_dist=True)
        return getattr(self, self.how)(loss, batch, batch_idx)

    def plainly(self, loss, batch, batch_idx):
        """And leaves the output to Lightning, which allows none."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def accumulating(self, loss, batch, batch_idx):
        """Two batches a step, without a message for the first; clipped, and with a schedule."""
        optimizer, is_last = self.optimizers(), batch_idx % 2 == 1
        if is_last:
            self.manual_backward(loss / 2)
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        else:
            with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():
                self.manual_backward(loss / 2)
        return {"loss": loss.detach()}

    def several_backwards(self, loss, batch, batch_idx):
        """Two backwards of one graph, and one of a weight."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        self.manual_backward(1e-2 * self.norm.weight.square().sum())
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        optimizer.step()

    def in_a_closure(self, loss, batch, batch_idx):
        """Forward and backward inside the optimizer's step."""
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def now_and_then(self, loss, batch, batch_idx):
        """Steps without a loss: every second batch is looked at only."""
        if batch_idx % 2 == 0:
            self.plainly(loss, batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Gan(pl.LightningModule):
    """Two networks and two optimizers that take turns."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        for_generator, for_critic = self.optimizers()
        z, real = batch["x"], batch["x"].roll(1, 1) * 2
        with self.toggled_optimizer(for_generator):
            loss = F.softplus(-self.critic(self.generator(z))).mean()
            self.manual_backward(loss)
            for_generator.step()
            for_generator.zero_grad()
        self.toggle_optimizer(for_critic)
        fake = self.generator(z).detach()
        losses = F.softplus(-self.critic(real)).mean(), F.softplus(self.critic(fake)).mean()
        for part in losses:
            self.manual_backward(part)
        self.clip_gradients(for_critic, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        for_critic.step()
        for_critic.zero_grad()
        self.untoggle_optimizer(for_critic)
        self.log_dict({"generator": loss, "critic": sum(losses)}, sync_dist=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = [
            torch.optim.AdamW(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


GAN_PLAN = {f"{net}.{i}": style for net in ("generator", "critic") for i, style in ((0, "colwise"), (2, "rowwise"))}
MODULES = {
    "plainly": (partial(ByHand, "plainly"), texts, PLAN),
    "accumulating": (partial(ByHand, "accumulating", optimizer="momentum"), texts, PLAN),
    "several backwards": (partial(ByHand, "several_backwards"), texts, PLAN),
    "in a closure": (partial(ByHand, "in_a_closure"), texts, PLAN),
    "now and then": (partial(ByHand, "now_and_then", optimizer="adamw", lr=0.01), texts, PLAN),
    "two networks": (Gan, points, GAN_PLAN),
}


def fit(make, batches, strategy, num_fits=1):
    """What a run leaves on this rank: the metrics, and on global rank 0 the whole weights."""
    seed_everything()
    module, end = make(), End()
    for _ in range(num_fits):
        chosen = "auto" if strategy is None else PTDPStrategy(**strategy)
        trainer = quiet_trainer(chosen, precision="64-true", callbacks=[end], use_distributed_sampler=False)
        trainer.fit(module, datamodule=ReplicaBatches(batches))
    return end.metrics, end.weights


class End(pl.Callback):
    """Keeps what is there when training ends."""

    def on_train_end(self, trainer, pl_module):
        self.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.weights = {n: w.clone() for n, w in whole_state(trainer).items()}


def assert_as_in_one_process(make, batches, t, d, plan, **options):
    one = run_spmd(fit, world_size=1, make=make, batches=batches, strategy=None, **options)[0]
    strategy = {"tensor_parallel_size": t, "pipeline_parallel_size": 1, "data_parallel_size": d}
    if t > 1:
        strategy["tensor_parallel_plan"] = plan
    runs = run_spmd(fit, world_size=t * d, make=make, batches=batches, strategy=strategy, **options)
    for metrics, _ in runs:
        assert metrics == pytest.approx(one[0], abs=1e-10)
    torch.testing.assert_close(runs[0][1], one[1], rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_a_step_by_hand_gives_the_numbers_of_one_process(name, layout):
    make, batch_of, plan = MODULES[name]
    assert_as_in_one_process(make, [batch_of(8, seed=i) for i in range(4)], *LAYOUTS[layout], plan)


class HeadNormByHand(HeadNormGPT):
    """A weight that each tensor peer uses on its own heads, trained by hand."""

    automatic_optimization = False
    training_step, plainly = ByHand.training_step, ByHand.plainly
    how = "plainly"


def test_a_second_fit_sums_over_tensor_peers_once():
    plan = PLAN | {"blocks.*.attention.head_norm": "replicated_with_grad_allreduce"}
    assert_as_in_one_process(HeadNormByHand, [texts(4, seed=i) for i in range(2)], 2, 1, plan, num_fits=2)


class Loner(ByHand):
    """Calls backward past the Trainer."""

    def alone(self, loss, batch, batch_idx):
        loss.backward()
        self.optimizers().step()

    def unsynced(self, loss, batch, batch_idx):
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(loss)
        self.optimizers().step()


@pytest.mark.parametrize("how", ["alone", "unsynced"])
def test_a_step_with_gradients_of_one_replica_is_refused(how):
    told = run_spmd(refused_step, world_size=2, how=how)
    assert told[0] == told[1]
    assert "an optimizer steps with gradients of one replica out of 2: those of ['token.weight'" in told[0]
    assert "call self.manual_backward(loss), not loss.backward()" in told[0]


def refused_step(how):
    with pytest.raises(RuntimeError, match="of one replica") as caught:
        fit(partial(Loner, how), [texts(4)], {})
    return str(caught.value)
