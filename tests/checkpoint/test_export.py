"""The command `ptdp export` in one process."""

import json
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning_ptdp.recipes.gpt import GPTModule
from torch import nn

from lightning_ptdp.checkpoint.safetensors_files import SafetensorsFiles
from lightning_ptdp.cli.export import run
from lightning_ptdp.data.tokenizer import END_OF_TEXT, train_tokenizer

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("calm_transformers")

SIZES = {"vocab_size": 300, "max_seq_len": 16, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "dropout": 0.1}


def recipe(**options):
    """With no weight at its simple start."""
    module = GPTModule(**SIZES, **options)
    module.configure_model()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def write(path, module, **more):
    """A checkpoint as Lightning writes it."""
    torch.save(
        {
            "state_dict": module.state_dict(),
            "hyper_parameters": dict(module.hparams),
            "optimizer_states": [],
            "lr_schedulers": [],
            "pytorch-lightning_version": pl.__version__,
            **more,
        },
        path,
    )
    return str(path)


@pytest.mark.parametrize("tied", [True, False])
def test_recipe_becomes_gpt2_with_equal_logits(tied, tmp_path):
    module = recipe(tie_embeddings=tied)
    source = write(tmp_path / "last.ckpt", module)
    assert run([source, str(tmp_path / "hf"), "--to=hf"]) == 0
    gpt2 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert isinstance(gpt2, transformers.GPT2LMHeadModel)
    assert (gpt2.lm_head.weight is gpt2.transformer.wte.weight) == tied
    ids = torch.randint(SIZES["vocab_size"], (3, 16))
    with torch.no_grad():
        torch.testing.assert_close(gpt2(ids).logits, module(ids), rtol=0, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "last.ckpt"]


def test_weights_keep_their_precision(tmp_path):
    module = recipe().to(torch.bfloat16)
    assert run([write(tmp_path / "last.ckpt", module), str(tmp_path / "hf"), "--to=hf"]) == 0
    gpt2 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert gpt2.dtype == torch.bfloat16
    assert torch.equal(gpt2.transformer.h[1].mlp.c_fc.weight, module.net.blocks[1].mlp.up.weight.T)


def test_tokenizer_of_the_checkpoint_goes_along(tmp_path):
    tokenizer = train_tokenizer(["a small corpus, a small text"] * 9, vocab_size=280, show_progress=False)
    source = write(tmp_path / "last.ckpt", recipe(), TextDataModule={"tokenizer": tokenizer.to_str()})
    assert run([source, str(tmp_path / "hf"), "--to=hf"]) == 0
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "a small text\n\tof \u00e9"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert loaded.eos_token_id == end
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.bos_token_id, config.eos_token_id) == (end, end)


class Wrapper(pl.LightningModule):
    """Holds a model of transformers that its hyper-parameters tell."""

    def __init__(self, hidden_size):
        super().__init__()
        self.save_hyperparameters()
        config = transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=hidden_size,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = transformers.LlamaForCausalLM(config)


def make_wrapper():
    return Wrapper(16)


@pytest.mark.parametrize("module", ["Wrapper", "make_wrapper"])
def test_wrapped_model_is_saved_with_the_weights_of_the_checkpoint(module, tmp_path):
    wrapper = Wrapper(16).eval()
    source = write(tmp_path / "last.ckpt", wrapper)
    wanted = [source, str(tmp_path / "hf"), "--to=hf", f"--module={__name__}.{module}", "--max-shard-size=5KB"]
    assert run(wanted) == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert SafetensorsFiles(tmp_path / "hf").file_of.keys() == index["weight_map"].keys()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.randint(61, (3, 8))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, wrapper.model(ids).logits)


def test_weights_only_leaves_the_run_out(tmp_path):
    source = write(tmp_path / "last.ckpt", recipe(), epoch=3, callbacks={})
    for option, expected in ([], set()), (["--weights-only"], {"optimizer_states", "lr_schedulers", "callbacks"}):
        assert run([source, str(tmp_path / "out.ckpt"), "--force", *option]) == 0
        before, after = (torch.load(path, weights_only=True) for path in (source, tmp_path / "out.ckpt"))
        assert before.keys() - after.keys() == expected
        torch.testing.assert_close(after["state_dict"], before["state_dict"], rtol=0, atol=0)


class Plain(pl.LightningModule):
    """Holds no model of transformers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Thing:
    """Of a class that reading would run code of."""


FAULTS = {
    "missing": (["{tmp}/no.ckpt", "{tmp}/out"], "there is no checkpoint"),
    "no checkpoint": (["{tmp}", "{tmp}/out"], "is no checkpoint: it has no .metadata and meta.pt"),
    "target exists": (["{tmp}/last.ckpt", "{tmp}/there"], "there exists; choose another place, or replace it with --f"),
    "target is the source": (["{tmp}/last.ckpt", "{tmp}/last.ckpt", "--force"], "is the checkpoint itself"),
    "objects": (["{tmp}/thing.ckpt", "{tmp}/out"], "if you trust where it comes from, pass --trusted"),
    "objects before a tokenizer": (["{tmp}/thing.ckpt", "{tmp}/out", "--to=hf"], "pass --trusted"),
    "weights of another": (
        ["{tmp}/other.ckpt", "{tmp}/out", "--to=hf"],
        "Error(s) in loading state_dict for GPTModule",
    ),
    "no model": (
        ["{tmp}/plain.ckpt", "{tmp}/out", "--to=hf", f"--module={__name__}.Plain"],
        "Plain must hold one model of transformers to be exported as such, and holds none",
    ),
    "unknown module": (["{tmp}/last.ckpt", "{tmp}/out", "--to=hf", "--module=nothing.There"], "nothing.There is not f"),
    "no arguments for the module": (
        ["{tmp}/plain.ckpt", "{tmp}/out", "--to=hf", f"--module={__name__}.Wrapper"],
        "Wrapper cannot be made of the checkpoint's hyper-parameters []",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_and_leaves_nothing(fault, tmp_path, capsys):
    write(tmp_path / "last.ckpt", recipe())
    write(tmp_path / "plain.ckpt", Plain())
    write(tmp_path / "other.ckpt", Plain(), hyper_parameters=SIZES)
    write(tmp_path / "thing.ckpt", recipe(), thing=Thing())
    (tmp_path / "there").touch()
    before = sorted(tmp_path.iterdir())
    arguments, message = FAULTS[fault]
    assert run([argument.format(tmp=tmp_path) for argument in arguments]) == 1
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_trusted_objects_are_kept(tmp_path):
    source = write(tmp_path / "last.ckpt", recipe(), thing=Thing())
    assert run([source, str(tmp_path / "out.ckpt"), "--trusted"]) == 0
    assert isinstance(torch.load(tmp_path / "out.ckpt", weights_only=False)["thing"], Thing)


def test_without_transformers_the_extra_is_named(tmp_path, capsys, monkeypatch):
    source = write(tmp_path / "last.ckpt", recipe())
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run([source, str(tmp_path / "hf"), "--to=hf"]) == 1
    assert "pip install 'lightning_ptdp[hf]'" in capsys.readouterr().err
