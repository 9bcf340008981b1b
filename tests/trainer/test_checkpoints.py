"""A checkpoint is the plain module's, whatever layout saved it and whatever layout loads it."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, texts
from tests.oracle import Recorder, ReplicaBatches, join, quiet_trainer, serial
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

MAKE = partial(GPT, optimizer="adamw", tied=True)
BATCHES = [texts(4, seed=i) for i in range(4)]
LAYOUTS = {"one": (1, 1, 1, 1), "t2": (2, 1, 1, 1), "p2": (1, 2, 1, 1), "p2v2": (1, 2, 2, 1), "t2p2": (2, 2, 1, 1)}


def strategy(t, p, v, d):
    return PTDPStrategy(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        virtual_pipeline_size=v,
        data_parallel_size=d,
        micro_batch_size=1,
        tensor_parallel_plan=PLAN if t > 1 else None,
    )


def train(sizes, batches, save=None, resume=None) -> Any:
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy(*sizes),
        callbacks=[recorder],
        precision="64-true",
        use_distributed_sampler=False,
        max_epochs=2 if resume else 1,
    )
    trainer.fit(MAKE(), datamodule=ReplicaBatches(batches), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return recorder.part


def world(sizes):
    t, p, _, d = sizes
    return t * p * d


@pytest.fixture(scope="module")
def whole_run():
    return serial(MAKE, BATCHES)


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", ["one", "t2p2", "p2v2"])
def test_run_goes_on_in_another_layout_as_if_it_had_not_stopped(saved, loaded, whole_run, tmp_path):
    path = str(tmp_path / "last.ckpt")
    run_spmd(train, world_size=world(LAYOUTS[saved]), timeout=60, sizes=LAYOUTS[saved], batches=BATCHES[:2], save=path)
    parts = run_spmd(
        train, world_size=world(LAYOUTS[loaded]), timeout=60, sizes=LAYOUTS[loaded], batches=BATCHES[2:], resume=path
    )
    for name, expected in whole_run.weights[-1].items():
        torch.testing.assert_close(join(parts).weights[-1][name], expected, rtol=0, atol=1e-10)


def plain_keys():
    module = MAKE()
    optimizer = module.configure_optimizers()
    return list(module.state_dict()), len(optimizer.param_groups[0]["params"])


def test_file_is_that_of_the_plain_module(tmp_path):
    path = str(tmp_path / "last.ckpt")
    run_spmd(train, world_size=4, timeout=60, sizes=LAYOUTS["t2p2"], batches=BATCHES[:2], save=path)
    saved = torch.load(path, weights_only=True)
    keys, num_parameters = plain_keys()
    assert list(saved["state_dict"]) == keys
    module = MAKE()
    module.load_state_dict(saved["state_dict"], strict=True)
    (optimizer,) = saved["optimizer_states"]
    assert optimizer["param_groups"][0]["params"] == list(range(num_parameters))
    shapes = [tuple(p.shape) for p in module.parameters()]
    assert [tuple(optimizer["state"][i]["exp_avg"].shape) for i in range(num_parameters)] == shapes


def load_strictly(path):
    with pytest.raises(RuntimeError, match=r"missing \['.*'\], unexpected \['strange'\]"):
        quiet_trainer(strategy(1, 2, 1, 1), precision="64-true").fit(
            MAKE(), datamodule=ReplicaBatches(BATCHES), ckpt_path=path
        )


def test_weights_of_another_model_are_refused_on_every_rank(tmp_path):
    path = str(tmp_path / "other.ckpt")
    state = MAKE().state_dict()
    state["strange"] = state.popitem()[1]
    torch.save({"state_dict": state, "pytorch-lightning_version": pl.__version__}, path)
    run_spmd(load_strictly, world_size=2, path=path)
