"""The command ptdp check: a configuration's first batch, whole and split."""

import pytest

from lightning_ptdp.cli import main
from tests.cli.test_main import corpus_in, flags, help_of, leave_the_process_as_it_was

__all__ = ["leave_the_process_as_it_was"]  # a fixture, for each test here too

SIZES = ["vocab_size", "280", "max_seq_len", "16", "num_layers", "4", "hidden_size", "16", "num_heads", "2"]


def of_recipe(tmp_path, *, batch_size="4"):
    """Arguments for a small model of the recipe that trains on four processes."""
    data = [*corpus_in(tmp_path), "batch_size", batch_size, "val_fraction", "0.2"]
    return ["check", "--config", "gpt/tiny", *flags(SIZES, "--model."), *flags(data, "--data.")]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders and seeds
def test_layout_of_a_configuration_is_checked_without_its_devices(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*of_recipe(tmp_path), "--micro-batch-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert (
        "check of GPTModule: tensor 2 x pipeline 2 x data 1; blocks of 'net.blocks' in each stage: 1, 1, 1, 1" in shown
    )
    assert "one batch of 4 rows, 2 microbatches a replica, in float64" in shown
    assert shown.endswith("This layout computes what one process computes.\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "text"]


@pytest.mark.filterwarnings("ignore")
def test_options_override_and_faults_are_a_status(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*of_recipe(tmp_path), "--tensor-parallel-size=3", "--data_parallel_size=8"]) == 1
    shown = capsys.readouterr().out
    assert "'net.blocks.0.attn.q' has 2 heads, and tensor_parallel_size=3" in shown
    assert "each of data_parallel_size=8 replicas needs a row of the batch, and it has 4" in shown


def test_help_tells_the_options(capsys):
    shown = help_of(capsys, "check")
    for option in (
        "--tensor_parallel_size",
        "--pipeline_parallel_size",
        "--virtual_pipeline_size",
        "--dtype",
        "--config",
    ):
        assert option in shown
    assert "ranks that share the layers; overrides the strategy's" in shown
