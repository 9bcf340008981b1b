"""A checkpoint is whole, or it is not there, whatever happens while it is written (PO-19)."""

import errno
import os
import shutil
import signal
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.checkpoint import complete_or_absent, single
from lightning_ptdp.checkpoint.checked_files import Summing
from lightning_ptdp.checkpoint.errors import CheckpointError
from lightning_ptdp.checkpoint.reading import read_checkpoint
from tests.fits import Net, batches_of
from tests.models import GPT
from tests.oracle import Recorder, ReplicaBatches, join, quiet_trainer, serial
from tests.processes import run_processes
from tests.spmd import run_spmd
from tests.trainer import killed_job
from tests.trainer.killed_job import BATCHES, trainer_that_saves_each_step


def restart(folder):
    """Go on from the last checkpoint; returns what was seen, the step it began with, and what was said."""
    recorder = Recorder()
    trainer = trainer_that_saves_each_step(folder, callbacks=[recorder, begun := Begun()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(GPT(), datamodule=ReplicaBatches(BATCHES), ckpt_path="last")
    return recorder.part, begun.step, [str(warning.message) for warning in said]


class Begun(pl.Callback):
    """Remembers the step that training began with."""

    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step


@pytest.mark.slow
def test_killed_save_is_passed_over_and_training_goes_on_from_the_one_before(tmp_path):
    codes, output = run_processes(killed_job.job, folder=tmp_path)
    assert codes[3] == -signal.SIGKILL, output
    assert 0 not in codes, "the others end by themselves"
    names = {"step=1.ckpt", "last.ckpt", ".step=2.ckpt.unfinished"}
    assert {path.name for path in tmp_path.iterdir() if "ckpt" in path.name} == names

    ranks = run_spmd(restart, world_size=4, timeout=60, folder=str(tmp_path))
    assert [step for _, step, _ in ranks] == [1] * 4
    (told,) = [text for text in ranks[0][2] if "passed over" in text]
    assert ".step=2.ckpt.unfinished" in told
    assert "its writing was cut off" in told
    initial = join([part for part, _, _ in ranks]).initial
    for name, expected in serial(GPT, BATCHES[:1]).weights[0].items():
        torch.testing.assert_close(initial[name], expected, rtol=0, atol=1e-10)
    assert not list(tmp_path.glob(".*")), "step 2 was written again"
    assert read_checkpoint(tmp_path / "step=2.ckpt")["global_step"] == 2


# -- ModelCheckpoint ---------------------------------------------------------------------------------------------------


class Measured(Net):
    """With a metric that grows, and a test step."""

    def training_step(self, batch, batch_idx):
        self.log("seen", float(self.trainer.global_step))
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


def fit(folder, checkpoint, batches=3, **strategy):
    """Train with a ModelCheckpoint on t = 1, p = 2."""
    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **checkpoint)
    trainer = quiet_trainer(
        PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1, **strategy),
        callbacks=[callback],
        enable_checkpointing=True,
    )
    trainer.fit(Measured(), datamodule=ReplicaBatches(batches_of(*[4] * batches)))
    return trainer, callback


def fit_test_and_save(folder, checkpoint):
    trainer, callback = fit(folder, checkpoint)
    trainer.test(trainer.lightning_module, DataLoader(batches_of(4), batch_size=None), ckpt_path="best", verbose=False)
    again = trainer.ckpt_path
    trainer.save_checkpoint(os.path.join(folder, "after-test.ckpt"))
    return again, callback.last_model_path


MODEL_CHECKPOINTS = {
    "the last": ({"save_top_k": 1}, ["step=3.ckpt"], 3, 3),
    "the best": ({"save_top_k": 2, "monitor": "seen", "mode": "min"}, ["step=1.ckpt", "step=2.ckpt"], 1, 2),
    "all": ({"save_top_k": -1}, ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"], 3, 3),
    "a copy": ({"save_top_k": 1, "save_last": True}, ["last.ckpt", "step=3.ckpt"], 3, 3),
    "a link": ({"save_top_k": 1, "save_last": "link"}, ["last.ckpt", "step=3.ckpt"], 3, 3),
}


@pytest.mark.parametrize(("checkpoint", "left", "best", "newest"), MODEL_CHECKPOINTS.values(), ids=MODEL_CHECKPOINTS)
def test_model_checkpoint_keeps_what_it_should_and_nothing_else(checkpoint, left, best, newest, tmp_path):
    ranks = run_spmd(fit_test_and_save, world_size=2, timeout=60, folder=str(tmp_path), checkpoint=checkpoint)
    assert ranks == [(str(tmp_path / f"step={best}.ckpt"), ranks[0][1])] * 2
    assert sorted(os.listdir(tmp_path)) == sorted(["after-test.ckpt", *left])
    for name in left:
        files = complete_or_absent.files(tmp_path / name)
        assert [file.damage() for file in files] == [None] * len(files)
        assert {file.path.name for file in files} | {"manifest.json"} == set(os.listdir(tmp_path / name))
    assert read_checkpoint(tmp_path / left[-1])["global_step"] == newest
    weights = read_checkpoint(tmp_path / f"step={best}.ckpt")["state_dict"]
    after_test = read_checkpoint(tmp_path / "after-test.ckpt")["state_dict"]
    assert all(torch.equal(after_test[name], weights[name]) for name in weights)
    if checkpoint.get("save_last") == "link":
        assert os.readlink(tmp_path / "last.ckpt") == "step=3.ckpt"


# -- damage ------------------------------------------------------------------------------------------------------------


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "a shard is missing": ("__1_0.distcp", lambda file: file.unlink(), "is missing"),
    "a shard was cut": ("__0_0.distcp", lambda file: os.truncate(file, 100), "has 100 bytes, and was written with"),
    "a bit flipped": ("__1_0.distcp", flip_a_bit, "has other contents than were written"),
    "plain values are missing": ("meta.pt", lambda file: file.unlink(), "is missing"),
    "the index is missing": (".metadata", lambda file: file.unlink(), "is missing"),
    "the manifest was cut": ("manifest.json", lambda file: os.truncate(file, 100), "is damaged"),
}


def save_two(folder):
    trainer, _ = fit(folder, {"save_top_k": -1}, batches=2)
    trainer.save_checkpoint(os.path.join(folder, "last.ckpt"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of steps 1 and 2, and the last."""
    folder = tmp_path_factory.mktemp("saved")
    run_spmd(save_two, world_size=2, timeout=60, folder=str(folder))
    return folder


def resume(path):
    """What loading says."""
    with pytest.raises(CheckpointError) as told:
        quiet_trainer(PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1)).fit(
            Measured(), datamodule=ReplicaBatches(batches_of(4)), ckpt_path=path
        )
    return str(told.value)


def damage_all(folders):
    """Resume from each; in one body, for the price of one set-up."""
    return [resume(path) for path in folders]


def test_damaged_checkpoint_is_refused_on_every_rank_with_the_file_and_one_that_is_whole(saved, tmp_path):
    folders = []
    for name, (file, spoil, _) in DAMAGES.items():
        shutil.copytree(saved, tmp_path / name)
        shutil.rmtree(tmp_path / name / "step=1.ckpt")
        folders.append(tmp_path / name / "last.ckpt")
        spoil(folders[-1] / file)
    ranks = run_spmd(damage_all, world_size=2, timeout=60, folders=[str(path) for path in folders])
    assert ranks[0] == ranks[1]
    for text, folder, (file, _, says) in zip(ranks[0], folders, DAMAGES.values(), strict=True):
        assert f"the checkpoint file {folder / file} {says}" in text
        assert text.endswith(f"the newest whole one beside it is {folder.parent / 'step=2.ckpt'}")


def test_folder_that_is_no_checkpoint_is_refused(tmp_path):
    texts = run_spmd(resume, world_size=2, path=str(tmp_path))
    assert texts == [texts[0]] * 2
    assert f"the folder {tmp_path} is no checkpoint: it has no .metadata and meta.pt" in texts[0]


# -- what stands in the way of writing ---------------------------------------------------------------------------------


def save_in_vain(path, obstacle, one_file):
    """Save, and save over it where something is in the way; what it says."""
    trainer, _ = fit(os.path.dirname(path), {"save_top_k": 0}, batches=1, save_distributed_checkpoint=not one_file)
    trainer.save_checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:
        OBSTACLES[obstacle][0](patch)
        with pytest.raises(CheckpointError) as told:
            trainer.save_checkpoint(path)
    trainer.save_checkpoint(path + ".later")  # ranks are in step, and nothing is in the way any more
    return str(told.value)


def full_disk(patch, rank):
    write = Summing.write

    def full(stream, data):
        if torch.distributed.get_rank() == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(stream, data)

    patch.setattr(Summing, "write", full)


def full_disk_for_values(patch):
    def full(stream, offset, tensor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(single, "_write_at", full)


def read_only(patch):
    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    patch.setattr(os, "mkdir", refuse)


def cannot_rename(patch):
    replace = os.replace

    def refuse(source, target):
        if str(source).endswith(".unfinished"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        replace(source, target)

    patch.setattr(os, "replace", refuse)


OBSTACLES = {
    "full disk on rank 1": (lambda patch: full_disk(patch, 1), False, ".unfinished/__1_0.distcp'", 1),
    "full disk on rank 0": (lambda patch: full_disk(patch, 0), False, ".unfinished/__0_0.distcp'", 0),
    "read-only folder": (read_only, False, ".unfinished'", 0),
    "no new name": (cannot_rename, False, ".unfinished'", 0),
    "full disk, one file": (full_disk_for_values, True, ".unfinished'", 0),
    "no new name, one file": (cannot_rename, True, ".unfinished'", 0),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_failed_save_names_the_file_on_every_rank_and_leaves_the_older_one(obstacle, tmp_path):
    _, one_file, names, rank = OBSTACLES[obstacle]
    path = tmp_path / "last.ckpt"
    texts = run_spmd(save_in_vain, world_size=2, timeout=60, path=str(path), obstacle=obstacle, one_file=one_file)
    assert texts == [texts[0]] * 2
    assert texts[0].startswith(f"saving the checkpoint {path} failed on rank {rank}: ")
    assert f"/.last.ckpt{names}" in texts[0]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "last.ckpt.later"], "nothing half done is left"
    older = read_checkpoint(path)["state_dict"]
    assert all(
        torch.equal(value, older[name]) for name, value in read_checkpoint(f"{path}.later")["state_dict"].items()
    )


def replace_by_the_other_form(path, folder_first):
    for is_folder in (folder_first, not folder_first):
        trainer, _ = fit(os.path.dirname(path), {"save_top_k": 0}, batches=1, save_distributed_checkpoint=is_folder)
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("folder_first", [True, False])
def test_a_folder_and_a_file_replace_each_other(folder_first, tmp_path):
    path = tmp_path / "last.ckpt"
    run_spmd(replace_by_the_other_form, world_size=2, timeout=60, path=str(path), folder_first=folder_first)
    assert path.is_dir() is not folder_first
    assert read_checkpoint(path)["global_step"] == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]
