"""A checkpoint is the plain module's, whatever layout saved it and whatever layout loads it (PO-18)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, texts
from tests.oracle import Recorder, ReplicaBatches, join, quiet_trainer, serial
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

BATCHES = [texts(4, seed=i) for i in range(4)]
LAYOUTS = {"one": (1, 1, 1, 1), "t2": (2, 1, 1, 1), "p2": (1, 2, 1, 1), "p2v2": (1, 2, 2, 1), "t2p2d2": (2, 2, 1, 2)}


class OddGPT(GPT):
    """With a tied head, a weight of six elements, a buffer and two groups of parameters."""

    def __init__(self):
        super().__init__(optimizer="adamw", tied=True)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, 6))
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale.mean()

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)


def strategy(t, p, v, d, **arguments):
    return PTDPStrategy(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        virtual_pipeline_size=v,
        data_parallel_size=d,
        micro_batch_size=1,
        tensor_parallel_plan=PLAN if t > 1 else None,
        **arguments,
    )


def train(sizes, batches, save=None, resume=None, make=OddGPT, **arguments) -> Any:
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy(*sizes, **arguments),
        callbacks=[recorder],
        precision="64-true",
        use_distributed_sampler=False,
        max_epochs=2 if resume else 1,
    )
    trainer.fit(make(), datamodule=ReplicaBatches(batches), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return recorder.part


SAVED = {
    **{name: (sizes, {}) for name, sizes in LAYOUTS.items()},
    "d2, sharded": ((1, 1, 1, 2), {"distributed_optimizer": True}),
    "t2p2d2, sharded": ((2, 2, 1, 2), {"distributed_optimizer": True}),
}


def resume_all(sizes, batches, folder, **arguments):
    """Go on from what every layout saved."""
    return {name: train(sizes, batches, resume=f"{folder}/{name}.ckpt", **arguments) for name in SAVED}


def world(sizes):
    t, p, _, d = sizes
    return t * p * d


@pytest.fixture(scope="module")
def whole_run():
    return serial(OddGPT, BATCHES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two steps, by every layout."""
    folder = tmp_path_factory.mktemp("saved")
    for name, (sizes, arguments) in SAVED.items():
        save = f"{folder}/{name}.ckpt"
        run_spmd(train, world_size=world(sizes), timeout=60, sizes=sizes, batches=BATCHES[:2], save=save, **arguments)
    return folder


@pytest.mark.parametrize("loaded", SAVED)
def test_any_layout_goes_on_from_any_other_as_if_nothing_had_stopped(loaded, saved, whole_run):
    sizes, arguments = SAVED[loaded]
    ranks = run_spmd(
        resume_all,
        world_size=world(sizes),
        timeout=120,
        sizes=sizes,
        batches=BATCHES[2:],
        folder=str(saved),
        **arguments,
    )
    for source in SAVED:
        run = join([parts[source] for parts in ranks])
        assert run.losses == pytest.approx(whole_run.losses[2:], abs=1e-10), f"saved by {source}"
        for name, expected in whole_run.weights[-1].items():
            torch.testing.assert_close(run.weights[-1][name], expected, rtol=0, atol=1e-10)


def consolidate(folder, file):
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    subprocess.run([sys.executable, "-m", tool, str(folder), "--output_file", str(file)], check=True)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether nested values have the same bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def load_and_save_again(sizes, source, target, **arguments):
    trainer = quiet_trainer(strategy(*sizes, **arguments), precision="64-true", max_steps=2)
    trainer.fit(OddGPT(), datamodule=ReplicaBatches(BATCHES), ckpt_path=source)
    trainer.save_checkpoint(target)


@pytest.mark.parametrize("shards", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1), (1, 1, 1, 4)])
def test_bits_are_the_same_after_loading(sizes, shards, saved, tmp_path):
    again = str(tmp_path / "again.ckpt")
    source = str(saved / "t2p2d2, sharded.ckpt")
    run_spmd(
        load_and_save_again,
        world_size=world(sizes),
        timeout=60,
        sizes=sizes,
        source=source,
        target=again,
        distributed_optimizer=shards,
    )
    before, after = (torch.load(to_file(path), weights_only=True) for path in (source, again))
    assert same(before["state_dict"], after["state_dict"])
    assert same(before["optimizer_states"], after["optimizer_states"])


def to_file(folder):
    """What Lightning's tool makes of a folder, in this process."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

    file = Path(folder).with_suffix(".file")
    torch.save(_format_checkpoint(_load_distributed_checkpoint(Path(folder))), file)
    return file


def test_lightnings_tool_makes_a_plain_checkpoint_of_a_folder(saved, whole_run, tmp_path):
    file = tmp_path / "whole.ckpt"
    checkpoint = consolidate(saved / "t2p2d2.ckpt", file)
    assert list(checkpoint["state_dict"]) == list(OddGPT().state_dict())
    plain = OddGPT().double()
    recorder = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
    )
    trainer.fit(plain, datamodule=ReplicaBatches(BATCHES[2:]), ckpt_path=str(file))
    assert recorder.losses == pytest.approx(whole_run.losses[2:], abs=1e-10)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter, whole_run.weights[-1][name], rtol=0, atol=1e-10)


class Losses(pl.Callback):
    """Remembers them."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def test_nothing_in_a_folder_says_how_it_was_split(saved):
    kinds = {name: torch.load(to_file(saved / f"{name}.ckpt"), weights_only=True) for name in SAVED}
    one = kinds["one"]
    for other in kinds.values():
        assert list(other) == list(one)
        assert list(other["state_dict"]) == list(one["state_dict"])
        assert [group["params"] for group in other["optimizer_states"][0]["param_groups"]] == [
            group["params"] for group in one["optimizer_states"][0]["param_groups"]
        ]
        assert list(other["optimizer_states"][0]["state"]) == list(one["optimizer_states"][0]["state"])
    for meta in (torch.load(saved / f"{name}.ckpt" / "meta.pt", weights_only=True) for name in SAVED):
        assert {"epoch", "global_step", "loops", "lr_schedulers", "callbacks"} <= set(meta)


# -- one file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one", "p2v2", "t2p2d2"])
def test_one_file_is_that_of_the_plain_module(layout, saved, tmp_path):
    path, sizes = str(tmp_path / "last.ckpt"), LAYOUTS[layout]
    run_spmd(
        train,
        world_size=world(sizes),
        timeout=60,
        sizes=sizes,
        batches=BATCHES[:2],
        save=path,
        save_distributed_checkpoint=False,
    )
    checkpoint = torch.load(path, weights_only=True)
    module = OddGPT()
    assert list(checkpoint["state_dict"]) == list(module.state_dict())
    module.load_state_dict(checkpoint["state_dict"], strict=True)
    (state,) = checkpoint["optimizer_states"]
    optimizer = module.configure_optimizers()
    assert [group["params"] for group in state["param_groups"]] == [
        group["params"] for group in optimizer.state_dict()["param_groups"]
    ]
    optimizer.load_state_dict(state)
    folder = torch.load(to_file(saved / f"{layout}.ckpt"), weights_only=True)
    assert same(checkpoint["state_dict"], folder["state_dict"])
    by_name = folder["optimizer_states"][0]
    names = [name for group in by_name["param_groups"] for name in group["params"]]
    assert same({names[i]: values for i, values in state["state"].items()}, by_name["state"])
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_one_file_is_loaded_by_any_layout(saved, whole_run, tmp_path):
    path = str(tmp_path / "plain.ckpt")
    sizes = LAYOUTS["t2p2d2"]
    torch.save(torch.load(to_file(saved / "one.ckpt"), weights_only=True), path)
    parts = run_spmd(train, world_size=world(sizes), timeout=60, sizes=sizes, batches=BATCHES[2:], resume=path)
    assert join(parts).losses == pytest.approx(whole_run.losses[2:], abs=1e-10)


# -- what does not fit -------------------------------------------------------------------------------------------------


def load_strictly(path, message):
    with pytest.raises(RuntimeError, match=message):
        quiet_trainer(strategy(1, 2, 1, 1), precision="64-true").fit(
            OddGPT(), datamodule=ReplicaBatches(BATCHES), ckpt_path=path
        )


def test_weights_of_another_model_are_refused_on_every_rank(tmp_path):
    path = str(tmp_path / "other.ckpt")
    state = OddGPT().state_dict()
    state["strange"] = state.pop("blocks.3.down.bias")
    torch.save({"state_dict": state, "pytorch-lightning_version": pl.__version__}, path)
    message = r"missing \['blocks.3.down.bias'\], unexpected \['strange'\]"
    run_spmd(load_strictly, world_size=2, path=path, message=message)


class Renamed(OddGPT):
    """Takes checkpoints in which a weight had another name, and drops one on saving."""

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["scale"] = checkpoint["state_dict"].pop("old_scale")

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"].pop("steps", None)
        checkpoint["note"] = "kept"


class OldName(OddGPT):
    """Its weight has another name in checkpoints."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["old_scale"] = checkpoint["state_dict"].pop("scale")


def test_hooks_of_the_module_may_change_what_is_saved_and_loaded(tmp_path):
    old, new = str(tmp_path / "old.ckpt"), str(tmp_path / "new.ckpt")
    run_spmd(train, world_size=2, timeout=60, sizes=LAYOUTS["p2"], batches=BATCHES[:2], save=old, make=OldName)
    run_spmd(
        train,
        world_size=2,
        timeout=60,
        sizes=LAYOUTS["p2"],
        batches=BATCHES[:2],
        resume=old,
        save=new,
        make=Renamed,
    )
    checkpoint = torch.load(to_file(new), weights_only=True)
    assert checkpoint["note"] == "kept"
    assert set(OddGPT().state_dict()) - set(checkpoint["state_dict"]) == {"steps"}
