"""`ptdp fit | validate | test | predict`, and LightningCLI in a script of the user's, on several ranks."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.cli import main
from tests.cli.test_main import leave_the_process_as_it_was  # noqa: F401  a fixture
from tests.spmd import run_spmd

RECIPE = "lightning_ptdp.recipes.image_classifier"
MODEL = [f"--model={RECIPE}.ImageClassifier", "--model.channels=4"]
DATA = [f"--data={RECIPE}.ShapesDataModule", "--data.num_train=16", "--data.num_val=6", "--data.num_test=6"]
TRAINER = {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}
OPTIONS = [f"--trainer.{name}={value}" for name, value in TRAINER.items()]
BY_NAME = ["--trainer.strategy=ptdp"]
BY_CLASS = ["--trainer.strategy=lightning_ptdp.PTDPStrategy", "--trainer.strategy.data_parallel_size=2"]


class Witness(pl.Callback):
    """Writes down what a run was, on every rank."""

    def __init__(self, folder: str, note: str = "") -> None:
        self.folder, self.note = folder, note

    def teardown(self, trainer, pl_module, stage):
        seen = {
            "strategy": type(trainer.strategy).__name__,
            "world_size": trainer.world_size,
            "note": self.note,
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
            "steps": trainer.global_step,
            "seed": os.environ.get("PL_GLOBAL_SEED"),
            "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        }
        Path(self.folder, f"{trainer.state.fn.value}-{trainer.global_rank}.yaml").write_text(yaml.safe_dump(seen))


def run_on_ranks(commands, own_script=False):
    """Run each of the commands as a process of its own would."""
    pool = ["--trainer.plugins=tests.spmd.PoolEnvironment", f"--trainer.devices={dist.get_world_size()}"]
    for name, *arguments in commands:
        with patch.dict(os.environ), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if own_script:
                LightningCLI(args=[name, *arguments, *pool], save_config_kwargs={"overwrite": True})
            else:
                assert main([name, *arguments, *pool]) == 0


def written_config(folder):
    """A project's YAML: a seed, a logger and a callback."""
    lightning = "lightning.pytorch"
    logger = {"save_dir": str(folder), "name": "", "version": "logs"}
    checkpoint = {"dirpath": str(folder), "filename": "end"}
    trainer = TRAINER | {
        "default_root_dir": str(folder),
        "logger": {"class_path": f"{lightning}.loggers.CSVLogger", "init_args": logger},
        "callbacks": [{"class_path": f"{lightning}.callbacks.ModelCheckpoint", "init_args": checkpoint}],
    }
    path = folder / "project.yaml"
    path.write_text(yaml.safe_dump({"seed_everything": 7, "trainer": trainer}))
    return path


def seen_by(folder, stage):
    """What the ranks saw, which is the same."""
    mine, other = (yaml.safe_load((folder / f"{stage}-{rank}.yaml").read_text()) for rank in range(2))
    assert mine == other
    return mine


@pytest.mark.parametrize(("strategy", "own_script"), [(BY_NAME, False), (BY_CLASS, True)], ids=["ptdp", "own script"])
def test_every_subcommand_runs_on_all_ranks(tmp_path, strategy, own_script):
    common = [
        f"--config={written_config(tmp_path)}", *strategy, *MODEL, *DATA,
        "--trainer.callbacks+=tests.cli.test_trainer.Witness",
        f"--trainer.callbacks.folder={tmp_path}", "--trainer.callbacks.note=added",
    ]  # fmt: skip
    after = [[name, *common, f"--ckpt_path={tmp_path / 'end.ckpt'}"] for name in ("validate", "test", "predict")]
    run_spmd(run_on_ranks, world_size=2, timeout=60.0, commands=[["fit", *common], *after], own_script=own_script)
    runs = {stage: seen_by(tmp_path, stage) for stage in ("fit", "validate", "test", "predict")}
    for run in runs.values():
        assert (run["strategy"], run["world_size"], run["note"]) == ("PTDPStrategy", 2, "added")
        assert {"ModelCheckpoint", "Witness"} <= set(run["callbacks"])
        assert run["seed"] == "7"
    assert runs["fit"]["steps"] == 1
    assert runs["validate"]["metrics"]["val_loss"] == pytest.approx(runs["fit"]["metrics"]["val_loss"])
    (saved,) = tmp_path.rglob("config*.yaml")
    assert yaml.safe_load(saved.read_text())["model"]["init_args"]["channels"] == 4


def test_a_resumed_fit_goes_on(tmp_path):
    common = [
        *BY_NAME, *MODEL, *DATA, *OPTIONS, f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false",
        "--trainer.callbacks=tests.cli.test_trainer.Witness", f"--trainer.callbacks.folder={tmp_path}",
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        f"--trainer.callbacks.dirpath={tmp_path}", "--trainer.callbacks.filename=end",
    ]  # fmt: skip
    more = ["fit", *common, f"--ckpt_path={tmp_path / 'end.ckpt'}", "--trainer.max_epochs=3"]
    run_spmd(run_on_ranks, world_size=2, timeout=60.0, commands=[["fit", *common], more])
    assert seen_by(tmp_path, "fit")["steps"] == 3


WRONG = {
    "an unknown option": ["--trainer.max_stepz=3"],
    "an unknown argument of the strategy": [BY_CLASS[0], "--trainer.strategy.t=2"],
    "a value of another type": [BY_CLASS[0], "--trainer.strategy.micro_batch_size=many"],
    "an unknown class": ["--data=no.such.DataModule"],
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_ends_with_status_2_and_its_name(case, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", *MODEL, *WRONG[case]])
    assert end.value.code == 2
    option = WRONG[case][-1].split("=")[0].removeprefix("--")
    assert option.rpartition(".")[2] in capsys.readouterr().err


def test_print_config_shows_every_argument_of_the_strategy(capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", *MODEL, *DATA, *BY_CLASS, "--print_config"])
    assert end.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    assert shown["class_path"] == "lightning_ptdp.PTDPStrategy"
    assert shown["init_args"]["data_parallel_size"] == 2
    assert shown["init_args"]["micro_batch_size"] == "auto"


@pytest.mark.slow
def test_the_module_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lightning_ptdp", "fit", *BY_NAME, *MODEL, *DATA, *OPTIONS,
         "--trainer.devices=1", "--trainer.logger=false"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PTDPStrategy: tensor 1 x pipeline 1 x data 1" in done.stderr


# -- launchers -----------------------------------------------------------------------------------------------------


def test_one_process_runs_in_a_notebook_and_several_are_refused():
    """Lightning asks the launcher whether it can work there; one that starts scripts cannot."""
    with patch("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True):
        trainer = pl.Trainer(strategy=PTDPStrategy(), accelerator="cpu", devices=1, logger=False)
        assert trainer.strategy.launcher is None
        with pytest.raises(Exception, match="is not compatible with an interactive environment"):
            pl.Trainer(strategy="ptdp", accelerator="cpu", devices=2, logger=False)


JOBS = {
    "SLURM, tasks": ({"SLURM_NTASKS_PER_NODE": "4"}, "tasks per node"),
    "SLURM, nodes": ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}, "number of nodes"),
    "torchrun": ({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "the product"),
}
SLURM = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID"), "0")
SLURM |= {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "job", "SLURM_NODELIST": "a"}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_another_number_of_processes_is_named(job):
    """The scheduler says what it has started, and the Trainer's numbers must agree."""
    variables, what = JOBS[job]
    variables = variables | (TORCHRUN if job == "torchrun" else SLURM)
    with patch.dict(os.environ, variables), pytest.raises(ValueError, match=f"{what}.* does not match"):
        pl.Trainer(strategy="ptdp", accelerator="cpu", devices=2, max_epochs=1, logger=False)
