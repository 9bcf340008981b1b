"""The command ptdp: help, recipes, data, and a whole small training with text at the end."""

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

import lightning_ptdp
from lightning_ptdp.cli import main
from lightning_ptdp.cli.main import COMMANDS, TRAINER_COMMANDS, with_underscores
from lightning_ptdp.cli.phases import as_text
from lightning_ptdp.cli.recipes import bundled_recipes, describe
from lightning_ptdp.cli.trainer import with_recipe_paths


@pytest.fixture(autouse=True)
def leave_the_process_as_it_was() -> Iterator[None]:
    """A command owns its process; a test doesn't."""
    logger = logging.getLogger("lightning_ptdp")
    before = dict(os.environ), logger.level, logger.propagate, list(logger.handlers)
    states = random.getstate(), np.random.get_state()
    datasets.disable_progress_bars()
    with torch.random.fork_rng():
        yield
    datasets.enable_progress_bars()
    random.setstate(states[0])
    np.random.set_state(states[1])
    os.environ.clear()
    os.environ.update(before[0])
    logger.level, logger.propagate, logger.handlers = before[1:]


def text_of(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code == 0
    return text_of(capsys)


def test_no_argument_gives_the_overview(capsys):
    assert main([]) == 0
    shown = text_of(capsys)
    assert all(name in shown for name in [*TRAINER_COMMANDS, *COMMANDS])


def test_an_unknown_command_is_answered_with_the_known(capsys):
    assert main(["train"]) == 2
    assert "no command 'train'; there are fit, validate" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(capsys, name):
    assert COMMANDS[name].summary[1:] in help_of(capsys, name)


def test_every_option_of_data_and_generate_is_explained(capsys):
    for command, option in [("data", "--val_fraction"), ("generate", "--max_new_tokens")]:
        shown = help_of(capsys, command)
        assert option in shown
        assert "(type: int, default" in shown


def test_fit_explains_itself(capsys):
    assert "--trainer.max_steps" in help_of(capsys, "fit")


def test_recipes_are_listed_with_what_they_are(capsys):
    assert main(["recipes"]) == 0
    shown = text_of(capsys)
    for name, path in bundled_recipes().items():
        assert name in shown
        assert describe(path) in shown


def test_recipes_are_found_by_name_and_files_by_path(tmp_path, monkeypatch):
    tiny = str(bundled_recipes()["gpt/tiny"])
    assert with_recipe_paths(["--config", "gpt/tiny", "-c", "gpt/tiny.yaml", "--config=gpt/tiny", "gpt/tiny"]) == [
        "--config", tiny, "-c", tiny, f"--config={tiny}", "gpt/tiny",
    ]  # fmt: skip
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "tiny.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert with_recipe_paths(["--config", "gpt/tiny.yaml"]) == ["--config", "gpt/tiny.yaml"]


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipes_parse(capsys, name):
    if "PTDPStrategy" in bundled_recipes()[name].read_text() and not hasattr(lightning_ptdp, "PTDPStrategy"):
        pytest.skip("the strategy isn't there")
    layers = [] if name == "gpt/single" else ["--config", "gpt/single"]
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", name, *layers, "--print_config"])
    assert end.value.code == 0
    assert "devices: 1" in capsys.readouterr().out


def test_options_may_be_spelled_with_dashes():
    assert with_underscores(["--top-k=4", "--max-new-tokens", "7", "--prompt=a-b"]) == [
        "--top_k=4", "--max_new_tokens", "7", "--prompt=a-b",
    ]  # fmt: skip


def test_metrics_make_a_line():
    assert as_text({"v_num": 3, "train_loss": 4.1714, "rate": "slow"}) == "train_loss 4.171, rate slow"


def corpus_in(folder: Path) -> list[str]:
    (folder / "text").mkdir()
    for number in range(30):
        (folder / "text" / f"{number}.txt").write_text(f"this is line {number} of a small corpus\n" * 10)
    return ["paths", str(folder / "text"), "cache_dir", str(folder / "cache"), "vocab_size", "280", "seq_len", "16"]


def flags(pairs: list[str], prefix: str = "--") -> list[str]:
    return [f"{prefix}{name}={value}" for name, value in zip(pairs[::2], pairs[1::2], strict=True)]


def test_data_prepares_and_counts(capsys, tmp_path):
    assert main(["data", *flags(corpus_in(tmp_path)), "--val-fraction=0.2"]) == 0
    shown = text_of(capsys)
    assert "vocabulary 280" in shown
    assert "sequences of 16" in shown
    assert str(tmp_path / "cache") in shown


def test_a_fault_of_the_user_is_one_line_and_a_status(capsys, tmp_path):
    assert main(["data", f"--paths={tmp_path}/nowhere", f"--cache_dir={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith("ptdp data: every entry of paths must name a file")


def test_a_missing_checkpoint_and_another_folder_are_told(capsys, tmp_path):
    assert main(["generate", f"--ckpt={tmp_path}/no.ckpt"]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err
    assert main(["generate", f"--ckpt={tmp_path}"]) == 1
    assert "is no checkpoint: it has no .metadata and meta.pt" in capsys.readouterr().err


def test_a_checkpoint_without_tokenizer_is_told(capsys, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    assert main(["generate", f"--ckpt={tmp_path / 'other.ckpt'}"]) == 1
    assert "holds no tokenizer: it was trained without TextDataModule" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on sizes of machines and loaders
def test_a_trained_checkpoint_alone_generates_text(capsys, tmp_path):
    checkpoint = "lightning.pytorch.callbacks.ModelCheckpoint"
    sizes = ["vocab_size", "280", "max_seq_len", "16", "num_layers", "2", "hidden_size", "16", "num_heads", "2"]
    trainer = ["max_steps", "4", "accelerator", "cpu", "devices", "1", "default_root_dir", str(tmp_path),
               "enable_progress_bar", "false", "enable_model_summary", "false", "logger", "false"]  # fmt: skip
    status = main([
        "fit", "--seed_everything=false",
        *flags(trainer, "--trainer."),
        f"--trainer.callbacks={checkpoint}",
        f"--trainer.callbacks.dirpath={tmp_path}", "--trainer.callbacks.filename=end",
        "--model=lightning_ptdp.recipes.gpt.GPTModule", *flags(sizes, "--model."),
        "--data=lightning_ptdp.data.TextDataModule", *flags(corpus_in(tmp_path), "--data."),
        "--data.val_fraction=0.2", "--data.batch_size=2",
    ])  # fmt: skip
    assert status == 0
    for file in (tmp_path / "text").iterdir():
        file.unlink()  # neither corpus nor cache is needed
    (tmp_path / "cache").rename(tmp_path / "gone")
    said = capsys.readouterr().err
    assert f"checkpoint: {tmp_path / 'end.ckpt'}" in said
    texts = []
    for seed in (1, 1, 2):
        arguments = [f"--ckpt={tmp_path / 'end.ckpt'}", "--prompt=this is", "--max-new-tokens=20", f"--seed={seed}"]
        assert main(["generate", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("this is")
