"""What the hygiene fixture finds, and that it puts things right."""

import os
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.hygiene import Surroundings, seed_everything


def test_clean_test_leaves_nothing():
    before = Surroundings.observe()
    assert before.restore() == []


def test_set_variable_is_named_and_removed():
    before = Surroundings.observe()
    os.environ["FORGOTTEN"] = "1"
    assert before.restore() == ["environment variable FORGOTTEN: was None, is '1'; use monkeypatch.setenv"]
    assert "FORGOTTEN" not in os.environ


def test_removed_variable_comes_back(monkeypatch):
    monkeypatch.setenv("MISSED", "1")
    before = Surroundings.observe()
    del os.environ["MISSED"]
    assert before.restore() == ["environment variable MISSED: was '1', is None; use monkeypatch.setenv"]
    assert os.environ["MISSED"] == "1"


def test_variable_that_lightning_sets_is_removed_in_silence():
    before = Surroundings.observe()
    os.environ["PL_GLOBAL_SEED"] = "1"
    assert before.restore() == []
    assert "PL_GLOBAL_SEED" not in os.environ


def test_running_thread_is_named():
    before = Surroundings.observe()
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="forgotten")
    thread.start()
    leaks = before.restore()
    leave.set()
    thread.join()
    assert leaks == ["thread 'forgotten' is still running; join it, or shut its executor down"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda: torch.set_default_device("meta"), "default device"),
        (lambda: torch.use_deterministic_algorithms(False), "deterministic algorithms"),
        (lambda: torch.set_grad_enabled(False), "gradient mode"),
        (lambda: torch.set_num_threads(2), "number of threads"),
    ],
)
def test_setting_of_torch_is_named_and_set_back(change, name):
    before = Surroundings.observe()
    change()
    (leak,) = before.restore()
    assert leak.startswith(f"torch's {name}: was ")
    assert before.restore() == []


def test_process_group_is_named_and_destroyed():
    before = Surroundings.observe()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert before.restore() == ["default process group: made and not destroyed; call destroy_process_group"]
    assert not dist.is_initialized()


def test_seeds_repeat_every_generator():
    seed_everything(3)
    first = torch.rand(2)
    seed_everything(3)
    assert torch.equal(torch.rand(2), first)


def test_every_test_starts_from_the_same_seeds():
    here = torch.rand(2)
    seed_everything()
    assert torch.equal(torch.rand(2), here)


def test_warning_is_an_error():
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


def test_warning_of_the_host_is_none():
    warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use ...", FutureWarning, stacklevel=1)
