"""Averages of weights are those of one process: in evaluation, in checkpoints and after a resume."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_ptdp.callbacks.resuming import KEY
from lightning_ptdp.checkpoint.reading import read_checkpoint
from tests.hygiene import seed_everything
from tests.models import ValidatedGPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer, whole_state
from tests.spmd import run_spmd
from tests.trainer.test_finetuning import check_weights, no_sync_advice, strategy, world

BATCHES = [texts(4, seed=i) for i in range(2)]
MAKE = partial(ValidatedGPT, tied=True, optimizer="adamw", lr=0.01)
CALLBACKS = {
    "EMA": partial(EMAWeightAveraging, decay=0.6),
    "EMA every second step, from the third": partial(
        EMAWeightAveraging, decay=0.6, update_every_n_steps=2, update_starting_at_step=2
    ),
    "mean": WeightAveraging,
    "SWA": partial(StochasticWeightAveraging, 0.02, swa_epoch_start=1, annealing_epochs=2),
}


class Validation(ReplicaBatches):
    """The same batches for training and validation."""

    def val_dataloader(self):
        return self.train_dataloader()


class Losses(Callback):
    """What validation measures."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append(float(trainer.callback_metrics["val_loss"]))


def average(sizes, name, folder, epochs=3, resume=None):
    """What validation measured; the weights at the end; the rest goes into a checkpoint."""
    seed_everything()
    losses = Losses()
    trainer = quiet_trainer(
        "auto" if sizes is None else strategy(**sizes),
        callbacks=[CALLBACKS[name](), losses],
        precision="64-true",
        use_distributed_sampler=False,
        max_epochs=epochs,
    )
    module = MAKE().double()  # so that the plain Trainer's average is in double, too
    with no_sync_advice():
        trainer.fit(module, datamodule=Validation(BATCHES), ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    return losses.seen, whole_state(trainer)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("EMA", {"t": 2, "p": 2}),
        ("EMA every second step, from the third", {"p": 2, "d": 2}),
        ("mean", {"p": 2, "v": 2}),
        ("SWA", {"t": 2, "p": 2}),
    ],
    ids=["EMA t2p2", "late EMA p2d2", "mean p2v2", "SWA t2p2"],
)
def test_average_is_that_of_one_process(name, sizes, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    ((losses, weights),) = run_spmd(average, world_size=1, sizes=None, name=name, folder=str(one))
    results = run_spmd(average, world_size=world(sizes), timeout=60, sizes=sizes, name=name, folder=str(many))
    check_weights(results[0][1], weights)
    for seen, _ in results:
        assert seen == pytest.approx(losses, abs=1e-6)
    check_checkpoint(
        read_checkpoint(many / "3.ckpt", weights_only=False), read_checkpoint(one / "3.ckpt", weights_only=False)
    )


def check_checkpoint(many, one):
    assert many.keys() == one.keys() | {KEY}
    for key in ("state_dict", "current_model_state"):
        if key in one:
            check_weights(many[key], one[key])
    assert many.get("averaging_state") == one.get("averaging_state")
    for name, state in one["callbacks"].items():
        if "average_model_state" in state:
            check_weights(many["callbacks"][name].pop("average_model_state"), state.pop("average_model_state"))
        assert many["callbacks"][name] == state


@pytest.mark.parametrize("saved", [None, {"t": 2, "p": 2}], ids=["from one process", "from t2p2"])
@pytest.mark.parametrize("name", ["EMA", "SWA"])
def test_average_goes_on_after_a_resume(name, saved, tmp_path):
    run = {"name": name, "folder": str(tmp_path), "epochs": 2}
    run_spmd(average, world_size=world(saved or {}), timeout=60, sizes=saved, **run)
    run |= {"epochs": 4, "resume": str(tmp_path / "2.ckpt")}
    plain = str(tmp_path / "plain.ckpt")
    torch.save(read_checkpoint(tmp_path / "2.ckpt", weights_only=False), plain)
    ((losses, weights),) = run_spmd(average, world_size=1, sizes=None, **{**run, "resume": plain})
    results = run_spmd(average, world_size=4, timeout=60, sizes={"t": 2, "p": 2}, **run)
    check_weights(results[0][1], weights)
    assert results[0][0] == pytest.approx(losses, abs=1e-6)
