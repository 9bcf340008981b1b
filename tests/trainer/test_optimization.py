"""What happens around an optimizer step is what happens in one process: windows, groups, schedules, a user's hooks."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_ptdp import PTDPStrategy
from tests.fits import Net, assert_like_one_process, batches_of, fit, fit_under
from tests.spmd import SpmdError, run_spmd


class Grouped(Net):
    """Decay for matrices alone, a rate of its own for the head, and a frozen embedding that is left out."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)

    def configure_optimizers(self):
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        assert len(trained) == 18, "of all layers, on every rank"
        head = [p for name, p in trained.items() if name.startswith("head")]
        inner = [p for name, p in trained.items() if not name.startswith("head")]
        return torch.optim.AdamW(
            [
                {"params": [p for p in inner if p.ndim == 2], "weight_decay": 0.1},
                {"params": [p for p in inner if p.ndim == 1], "weight_decay": 0.0},
                {"params": head, "lr": 0.01},
            ],
            lr=0.05,
        )


class Scheduled(Net):
    """schedule: what `configure_optimizers` returns beside the optimizer, as a function of optimizer and module."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer, self)}


def every_second_step(optimizer, _):
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 2}


def every_epoch(optimizer, _):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def one_cycle(optimizer, module):
    steps = int(module.trainer.estimated_stepping_batches)
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, steps), "interval": "step"}


def on_plateau(optimizer, _, interval="epoch"):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
    return {"scheduler": plateau, "monitor": "loss", "interval": interval}


class OwnSchedulerStep(Scheduled):
    """Holds the rate in the first epoch."""

    def lr_scheduler_step(self, scheduler, metric):
        if self.current_epoch:
            scheduler.step()


class WarmUp(Net):
    """Sets the rate after each step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = self.lr / (1 + self.trainer.global_step)


class SkipsSteps(Net):
    """Lets every second batch pass without a step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class TwoClosures(Net):
    """Runs each batch twice."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class ZerosInPlace(Net):
    """Keeps the gradients' tensors."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class EditsGradients(Net):
    """In both hooks that see them."""

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.add_(0.01)

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.mul_(0.5)

    def on_before_backward(self, loss):
        self.notes.append(round(float(loss.detach()), 9))


class FreezesForAWhile(Net):
    """A block has no gradient in every second batch."""

    def on_train_batch_start(self, batch, batch_idx):
        self.blocks[0].requires_grad_(batch_idx % 2 == 0)


class BatchOnly(Net):
    """Takes no batch_idx, and changes its batch in place."""

    def training_step(self, batch):
        y, x = batch.pop("y"), batch["x"]
        x *= 2
        return self.loss({"x": x, "y": y})


class LeavesEarly(Net):
    """Ends the first epoch after two batches."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 and self.current_epoch == 0 else None


class ClipsByItself(Net):
    """By Lightning's own function, with numbers of its own."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class ScalesByNorm(Net):
    """By hand, with the norm of the whole model."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        strategy, parameters = self.trainer.strategy, list(self.parameters())
        is_split = isinstance(strategy, PTDPStrategy)
        norm = strategy.gradient_norm() if is_split else torch.nn.utils.get_total_norm(p.grad for p in parameters)
        for p in parameters:
            p.grad.mul_(0.1 / norm)


TWO_EPOCHS = {"max_epochs": 2, "accumulate_grad_batches": 2}  # the last window of an epoch is partial

ROWS = {
    "windows of two": ("p2v2", Net, TWO_EPOCHS),
    "windows of two, clipped": ("p2d2", Net, {**TWO_EPOCHS, "gradient_clip_val": 0.1}),
    "steps, not epochs": ("t2", Net, {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2}),
    "clipped by value": ("t2p2", Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "parameter groups": ("t2p2", Grouped, {"gradient_clip_val": 0.5}),
    "schedule by steps": ("p2", partial(Scheduled, every_second_step), TWO_EPOCHS),
    "schedule by epochs": ("d2", partial(Scheduled, every_epoch), TWO_EPOCHS),
    "one cycle": ("p2d2", partial(Scheduled, one_cycle), TWO_EPOCHS),
    "on plateau": ("p2v2", partial(Scheduled, on_plateau), {"max_epochs": 3}),
    "on plateau, by steps": ("p2d2", partial(Scheduled, partial(on_plateau, interval="step")), TWO_EPOCHS),
    "own scheduler step": ("t2", partial(OwnSchedulerStep, every_epoch), {"max_epochs": 2}),
    "own optimizer step": ("p2", WarmUp, {}),
    "skipped steps": ("d2", SkipsSteps, {}),
    "two closures": ("p2d2", TwoClosures, {}),
    "own zero_grad": ("p2", ZerosInPlace, TWO_EPOCHS),
    "edited gradients": ("t2p2", EditsGradients, {}),
    "frozen for a while": ("p2", FreezesForAWhile, {}),
    "in place on the batch": ("p2v2", BatchOnly, TWO_EPOCHS),
    "in place on the batch, replicas": ("p2d2", BatchOnly, {}),
    "epoch left in a window": ("p2d2", LeavesEarly, TWO_EPOCHS),
    "own clipping": ("t2p2", ClipsByItself, {}),
    "own clipping by the whole norm": ("t2p2", ScalesByNorm, {}),
}


@pytest.mark.parametrize(("layout", "make", "trainer"), ROWS.values(), ids=ROWS)
def test_fit_is_that_of_one_process(layout, make, trainer):
    fits, one = assert_like_one_process(layout, make, batches_of(4, 4, 4, 3, 2), trainer=trainer)
    assert all(seen.notes == one.notes for seen in fits)


@pytest.mark.parametrize("layout", ["p2v2", "d2"])
def test_length_of_a_window_follows_its_schedule(layout):
    assert_like_one_process(
        layout,
        Net,
        batches_of(4, 4, 4, 4, 3),
        trainer={"max_epochs": 3},
        callbacks=[partial(GradientAccumulationScheduler, {0: 2, 1: 3, 2: 1})],
    )


class ClipsItsPart(Net):
    """With a norm that knows one rank's part."""

    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class NeverCloses(Net):
    """Forgets the closure."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step()


class ReturnsNone(Net):
    """Skips a batch, after the first of its window."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return None if batch_idx in (1, 2) else loss


@pytest.mark.parametrize(
    ("layout", "make", "trainer", "words"),
    [
        ("p2", ClipsItsPart, {}, "hooks scaled the gradients of one model by different numbers"),
        ("t2", ClipsItsPart, {}, r"rank 0 by 0\.\d+, rank 1 by 0\.\d+"),
        ("d2", TwoClosures, TWO_EPOCHS, "optimizer_step called its closure again"),
        ("p2", NeverCloses, {}, "The closure hasn't been executed"),
    ],
)
def test_what_would_be_wrong_is_refused(layout, make, trainer, words):
    with pytest.raises(SpmdError, match=words):
        fit_under(layout, make, batches_of(4, 4), trainer=trainer)


def fit_without_warnings(**arguments):
    """Lightning warns of a skipped batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(**arguments)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lone_process_may_skip_batches(accumulate):
    arguments = {"make": ReturnsNone, "batches": batches_of(4, 4, 4, 4)}
    arguments["trainer"] = {"accumulate_grad_batches": accumulate}
    one = fit_without_warnings(strategy=None, **arguments)
    assert None in one.losses
    (seen,) = run_spmd(fit_without_warnings, world_size=1, strategy={}, **arguments)
    assert (seen.losses, seen.steps) == (one.losses, one.steps)
    for name, value in one.weights.items():
        torch.testing.assert_close(seen.weights[name], value, rtol=0.0, atol=1e-12)
