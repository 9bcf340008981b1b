"""Tests of the pool itself."""

import os
import threading
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from tests.spmd import PoolEnvironment, SpmdError, run_spmd, spmd

# Worlds.


def test_results_come_in_the_order_of_ranks():
    assert run_spmd(rank_and_size, world_size=4) == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ranks_form_one_world(world_size):
    assert run_spmd(sum_of_ranks, world_size=world_size) == [sum(range(world_size))] * world_size


def test_every_world_starts_from_the_same_seeds():
    assert run_spmd(draw) == run_spmd(draw)


def test_workers_live_from_world_to_world():
    assert run_spmd(process_id, world_size=2) == run_spmd(process_id, world_size=4)[:2]


def test_worlds_leave_no_files_or_threads_open():
    run_spmd(sum_of_ranks)
    before = run_spmd(num_files_and_threads)
    for _ in range(10):
        run_spmd(sum_of_ranks)
    assert run_spmd(num_files_and_threads) == before


# Ways to write a test.


@spmd(world_size=3)
def test_body_of_a_decorated_test_runs_on_every_rank():
    assert sum_of_ranks() == 3, "the ranks of a world of three add up to three"


@pytest.mark.parametrize("addend", [1.5, torch.tensor(2.5)])
@pytest.mark.parametrize("name", ["a", "b"])
@spmd(world_size=2)
def test_parametrized_arguments_reach_the_body(name, addend):
    assert name in "ab", name
    assert float(addend) in (1.5, 2.5), addend


@spmd(world_size=2)
def test_fixture_values_reach_the_body(tmp_path):
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], list(tmp_path.iterdir())


@pytest.mark.xfail(raises=SpmdError, strict=True)
@spmd(world_size=2)
def test_decorated_test_fails_when_one_rank_does():
    assert dist.get_rank() == 0


def test_nested_body_is_refused():
    with pytest.raises(ValueError, match="top level of an importable module"):
        spmd()(lambda: None)
    with pytest.raises(ValueError, match="top level of an importable module"):
        run_spmd(lambda: None)


def test_argument_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match=r"one of \['value'\] cannot"):
        run_spmd(identity, value=threading.Lock())


def test_result_that_cannot_be_sent_is_an_error_of_the_rank():
    with pytest.raises(SpmdError, match=r"rank [01] of 2 failed in tests\.test_spmd\.return_a_lock"):
        run_spmd(return_a_lock)


# Surroundings of a body.


def test_arguments_and_results_share_no_memory():
    sent = torch.zeros(3)
    first, second = run_spmd(add_one, value=sent)
    first.add_(1)
    assert sent.tolist() == [0, 0, 0]
    assert first.tolist() == [2, 2, 2]
    assert second.tolist() == [1, 1, 1]
    assert not second.is_shared()


def test_body_sees_what_a_launcher_sets():
    assert run_spmd(launch_variables) == [("0", "2", "0"), ("1", "2", "1")]
    assert "RANK" not in os.environ


def test_variables_of_the_parents_test_stay_there(monkeypatch):
    monkeypatch.setenv("LEFT_AT_HOME", "1")
    assert run_spmd(variable, name="LEFT_AT_HOME") == [None, None]


def test_body_runs_in_the_folder_of_the_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_spmd(folder) == [tmp_path, tmp_path]


def test_body_is_deterministic_on_one_thread():
    assert run_spmd(settings) == [(True, 1), (True, 1)]


def test_warnings_of_a_body_are_errors():
    with pytest.raises(SpmdError, match="UserWarning: a word of caution"):
        run_spmd(warn, message="a word of caution", category=UserWarning)


def test_warnings_of_the_host_are_let_pass():
    run_spmd(warn, message="`isinstance(treespec, LeafSpec)` is deprecated, use ...", category=FutureWarning)


def test_output_of_each_rank_is_printed_in_the_parent(capsys):
    run_spmd(speak)
    assert capsys.readouterr().out == "--- rank 0 printed:\n0 of 2\n--- rank 1 printed:\n1 of 2\n"


def test_output_of_a_hanging_rank_is_not_lost(capsys):
    with pytest.raises(SpmdError):
        run_spmd(speak_and_hang, timeout=0.5)
    assert capsys.readouterr().out == "--- rank 0 printed:\nlast words\n"


# Failures.


def test_failing_rank_is_named_with_its_traceback():
    with pytest.raises(SpmdError, match=r"^rank 1 of 3 failed in tests\.test_spmd\.fail_on_one") as caught:
        run_spmd(fail_on_one, world_size=3)
    first = str(caught.value).split("---")[0]
    assert "ValueError: rank one is unwell" in first
    assert "in fail_on_one" in first
    assert "spmd_worker" not in first


def test_places_of_the_other_ranks_are_shown():
    with pytest.raises(SpmdError) as caught:
        run_spmd(fail_on_one, world_size=3)
    _, rank_0, rank_2 = str(caught.value).split("---")
    assert rank_0.startswith(" rank 0 stood here")
    assert "in sum_of_ranks" in rank_0
    assert rank_2.startswith(" rank 2 stood here")
    assert "spmd_worker" not in rank_2


def test_ranks_that_fail_alike_are_all_shown():
    with pytest.raises(SpmdError) as caught:
        run_spmd(fail_on_all)
    assert str(caught.value).count("ValueError: all are unwell") == 2
    assert "failed too" in str(caught.value)


def test_hanging_ranks_are_ended_at_the_limit():
    start = time.monotonic()
    with pytest.raises(SpmdError, match=r"^of 2 ranks, 0, 1 still in .*hang_on_one at the limit of 0.5 s") as caught:
        run_spmd(hang_on_one, timeout=0.5)
    assert time.monotonic() - start < 5
    assert "in hang_on_one" in str(caught.value)
    assert "in sum_of_ranks" in str(caught.value)


def test_rank_that_was_through_is_said_to_be():
    with pytest.raises(SpmdError, match=r"^of 2 ranks, 0 still in(.|\n)*--- rank 1 was through"):
        run_spmd(hang_alone, timeout=0.5)


def test_dead_rank_is_named_before_those_that_missed_it():
    with pytest.raises(SpmdError, match=r"^rank 1 of 2 failed in .*\n\nthe process died with exit code 3"):
        run_spmd(die_on_one)


@pytest.mark.parametrize("body", ["fail_on_one", "hang_on_one", "die_on_one"])
def test_only_the_workers_of_a_failed_world_are_replaced(body):
    before = run_spmd(process_id, world_size=4)
    with pytest.raises(SpmdError):
        run_spmd(globals()[body], timeout=0.5)
    after = run_spmd(process_id, world_size=4)
    assert not set(before[:2]) & set(after)
    assert before[2:] == after[2:]


# What a body may not leave behind.


def leak_variable():
    os.environ["FORGOTTEN"] = "1"


def leak_thread():
    threading.Thread(target=time.sleep, args=(60,), name="forgotten").start()


def leak_default_dtype():
    torch.set_default_dtype(torch.float64)


def leak_deterministic_flag():
    torch.use_deterministic_algorithms(False)


def leak_loss_of_group():
    dist.destroy_process_group()


def leak_file():
    open(os.devnull)  # noqa: SIM115


@pytest.mark.parametrize(
    ("body", "leak"),
    [
        (leak_variable, "environment variable FORGOTTEN: was None, is '1'"),
        (leak_thread, "thread 'forgotten' is still running"),
        (leak_default_dtype, "torch's default dtype: was torch.float32, is torch.float64"),
        (leak_deterministic_flag, "torch's deterministic algorithms: was True, is False"),
        (leak_file, "ResourceWarning: unclosed file"),
        (leak_loss_of_group, "default process group: destroyed"),
    ],
)
def test_leak_is_an_error_that_names_it(body, leak):
    with pytest.raises(SpmdError) as caught:
        run_spmd(body)
    assert leak in str(caught.value)
    assert run_spmd(settings) == [(True, 1), (True, 1)]


def test_seed_variables_of_lightning_are_no_leak():
    run_spmd(pl.seed_everything, seed=1, verbose=False)
    assert run_spmd(variable, name="PL_GLOBAL_SEED") == [None, None]


# A Trainer in the pool.


def test_trainer_takes_the_world_it_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = run_spmd(fit)
    assert first == second


@spmd(world_size=2)
def test_environment_refuses_another_world():
    with pytest.raises(RuntimeError, match="asked for 3, found 2"):
        PoolEnvironment().set_world_size(3)


# Bodies.


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def sum_of_ranks():
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return int(total)


def draw():
    return torch.rand(()).item()


def process_id():
    return os.getpid()


def num_files_and_threads():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def identity(value):
    return value


def return_a_lock():
    return threading.Lock()


def add_one(value):
    return value.add_(1)


def launch_variables():
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]


def variable(name):
    return os.environ.get(name)


def folder():
    return Path.cwd()


def settings():
    return torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()


def warn(message, category):
    warnings.warn(message, category, stacklevel=1)


def speak():
    print(dist.get_rank(), "of", dist.get_world_size())


def speak_and_hang():
    if dist.get_rank() == 0:
        print("last words")
        time.sleep(60)


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    return sum_of_ranks()


def fail_on_all():
    raise ValueError("all are unwell")


def hang_on_one():
    if dist.get_rank() == 0:
        time.sleep(60)
    return sum_of_ranks()


def hang_alone():
    if dist.get_rank() == 0:
        time.sleep(60)


def die_on_one():
    if dist.get_rank() == 1:
        os._exit(3)
    return sum_of_ranks()


def fit():
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=PoolEnvironment(), process_group_backend="gloo"),
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    trainer.fit(model)
    return model.layer.weight.sum().item()
