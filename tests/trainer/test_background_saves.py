"""`async_checkpoint=True`: training goes on while a checkpoint is written, and nothing else differs."""

import errno
import os
import threading
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.checkpoint.checked_files import Summing
from lightning_ptdp.checkpoint.errors import CheckpointError
from lightning_ptdp.checkpoint.reading import read_checkpoint
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer, serial
from tests.spmd import PoolEnvironment, run_spmd
from tests.trainer.test_layouts import PLAN

BATCHES = [texts(4, seed=i) for i in range(4)]


class OwnIO(TorchCheckpointIO):
    """A user's."""


class AdamGPT(GPT):
    """Has moments to save."""

    def __init__(self):
        super().__init__(optimizer="adamw")


class Saves(pl.Callback):
    """Saves after some steps, and lets the writer go on after another, once it has seen what is there."""

    def __init__(self, folder, steps, released_after=0):
        self.folder, self.steps, self.released_after = folder, steps, released_after
        self.may_write = threading.Event()
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step in self.steps:
            trainer.save_checkpoint(os.path.join(self.folder, f"step={step}.ckpt"))
        if step == self.released_after:
            self.seen = os.listdir(self.folder)
            self.may_write.set()


def trainer_of(sizes, callbacks, **arguments):
    t, p = sizes
    return quiet_trainer(
        PTDPStrategy(
            tensor_parallel_size=t,
            pipeline_parallel_size=p,
            micro_batch_size=1,
            tensor_parallel_plan=PLAN if t > 1 else None,
            async_checkpoint=True,
            **arguments,
        ),
        callbacks=callbacks,
        precision="64-true",
        use_distributed_sampler=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )


def hold_back(patch, may_write):
    """Let nothing be written before an event."""
    write = Summing.write

    def wait_and_write(stream, data):
        assert may_write.wait(20.0), "training waited for the writer"
        return write(stream, data)

    patch.setattr(Summing, "write", wait_and_write)


def save_while_training(folder):
    saves = Saves(folder, steps=[1], released_after=3)
    with pytest.MonkeyPatch.context() as patch:
        hold_back(patch, saves.may_write)
        trainer_of((2, 2), [saves]).fit(AdamGPT(), datamodule=ReplicaBatches(BATCHES))
    return saves.seen, sorted(os.listdir(folder))


def test_training_goes_on_and_what_is_saved_is_of_the_time_of_the_call(tmp_path):
    ranks = run_spmd(save_while_training, world_size=4, timeout=60, folder=str(tmp_path))
    assert ranks == [([".step=1.ckpt.unfinished"], ["step=1.ckpt"])] * 4
    checkpoint = read_checkpoint(tmp_path / "step=1.ckpt")
    for name, expected in serial(AdamGPT, BATCHES[:1]).weights[0].items():
        torch.testing.assert_close(checkpoint["state_dict"][name], expected, rtol=0, atol=1e-10)
    assert checkpoint["global_step"] == 1
    assert {float(state["step"]) for state in checkpoint["optimizer_states"][0]["state"].values()} == {1.0}


# -- failures ----------------------------------------------------------------------------------------------------------


class Fails(pl.Callback):
    """On every rank, after a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise ValueError("bad sample")


def fail_to_write(folder, steps, rank):
    """Run out of space on one rank; the step at which training ends, and what is said."""
    saves = Saves(folder, steps)

    def full(stream, data):
        if torch.distributed.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    trainer = trainer_of((1, 2), [saves])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Summing, "write", full)
        with pytest.raises(CheckpointError) as told:
            trainer.fit(AdamGPT(), datamodule=ReplicaBatches(BATCHES))
    return trainer.global_step, str(told.value)


@pytest.mark.parametrize(("steps", "ends"), [([1, 3], 3), ([1], 4)], ids=["at the next save", "at the end of fit"])
def test_failure_of_a_save_is_raised_on_every_rank(steps, ends, tmp_path):
    ranks = run_spmd(fail_to_write, world_size=2, timeout=60, folder=str(tmp_path), steps=steps, rank=1)
    assert [step for step, _ in ranks] == [ends] * 2
    assert ranks[0] == ranks[1]
    assert f"saving the checkpoint {tmp_path}/step=1.ckpt failed on rank 1: OSError" in ranks[0][1]
    assert "__1_0.distcp" in ranks[0][1]
    assert os.listdir(tmp_path) == []


def fail_to_train(folder):
    """Fail while a checkpoint is written: that is ended, and the failure is the one that is raised."""
    saves = Saves(folder, steps=[1], released_after=2)
    with pytest.MonkeyPatch.context() as patch:
        hold_back(patch, saves.may_write)
        with pytest.raises(ValueError, match="bad sample"):
            trainer_of((1, 2), [saves, Fails(2)]).fit(AdamGPT(), datamodule=ReplicaBatches(BATCHES))


def test_training_that_fails_leaves_a_whole_checkpoint(tmp_path):
    run_spmd(fail_to_train, world_size=2, timeout=60, folder=str(tmp_path))
    assert os.listdir(tmp_path) == ["step=1.ckpt"]
    assert read_checkpoint(tmp_path / "step=1.ckpt")["global_step"] == 1


# -- ModelCheckpoint ---------------------------------------------------------------------------------------------------


def keep_the_last(folder):
    checkpoint = ModelCheckpoint(folder, filename="last-{step}", every_n_train_steps=1, save_top_k=1)
    trainer = trainer_of((1, 2), [checkpoint])
    trainer.fit(AdamGPT(), datamodule=ReplicaBatches(BATCHES))
    torch.distributed.barrier()  # rank 0 deletes, and has when its own fit ends
    left = sorted(os.listdir(folder))
    trainer.save_checkpoint(os.path.join(folder, "after.ckpt"))  # nobody would wait for it, so it is waited for
    is_there = os.path.exists(os.path.join(folder, "after.ckpt"))
    again = trainer_of((1, 2), [ModelCheckpoint(folder)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a folder that is not empty
        again.fit(AdamGPT(), datamodule=ReplicaBatches(BATCHES), ckpt_path="last")
    return left, is_there, os.path.basename(again.ckpt_path)


def test_model_checkpoint_removes_the_older_one_once_the_newer_is_whole(tmp_path):
    ranks = run_spmd(keep_the_last, world_size=2, timeout=60, folder=str(tmp_path))
    assert ranks == [(["last-step=4.ckpt"], True, "last-step=4.ckpt")] * 2
    assert not list(tmp_path.glob(".*"))


def refused(callbacks, arguments, plugins):
    with pytest.raises(ValueError) as told:
        quiet_trainer(
            PTDPStrategy(async_checkpoint=True, **arguments),
            callbacks=callbacks,
            plugins=[*plugins, PoolEnvironment()],
            enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        ).fit(AdamGPT(), datamodule=ReplicaBatches(BATCHES))
    return str(told.value)


@pytest.mark.parametrize(
    ("callbacks", "arguments", "plugins", "says"),
    [
        ([ModelCheckpoint(save_last="link")], {}, [], 'ModelCheckpoint(save_last="link") links to a checkpoint'),
        ([], {"save_distributed_checkpoint": False}, [], "async_checkpoint=True writes folders beside training"),
        ([], {}, [OwnIO()], "async_checkpoint=True writes folders beside training"),
    ],
    ids=["link", "one file", "own CheckpointIO"],
)
def test_what_cannot_be_saved_in_the_background_is_refused_by_name(callbacks, arguments, plugins, says):
    texts = run_spmd(refused, world_size=2, callbacks=callbacks, arguments=arguments, plugins=plugins)
    assert all(says in text for text in texts)
