"""A vocabulary of 61 comes from Hugging Face into any layout, and leaves it to one file or to Hugging Face (PO-20)."""

import shutil
import warnings
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning_ptdp.recipes.gpt import GPTModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.checkpoint.reading import read_checkpoint
from lightning_ptdp.checkpoint.safetensors_files import SafetensorsFiles
from lightning_ptdp.cli.export import run
from tests.hygiene import seed_everything
from tests.models import texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd
from tests.trainer.test_checkpoints import Losses, same

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("calm_transformers")]

VOCABULARY = 61
LAYOUTS = {"t1": (1, 1), "t2": (2, 1), "t4": (4, 1), "p2": (1, 2), "t2p2": (2, 2)}
IDS = texts(4, vocabulary=VOCABULARY)["ids"]


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


class Wrapper(pl.LightningModule):
    """Holds GPT-2; its steps change nothing."""

    def __init__(self):
        super().__init__()
        self.model = gpt2()

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch["ids"], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def predict_step(self, batch, batch_idx):
        return self.model(input_ids=batch, use_cache=False).logits

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder of several files, and the model in it."""
    seed_everything()
    model = gpt2().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("pretrained")
    model.save_pretrained(folder, max_shard_size="5KB")
    return folder, model


def strategy(t, p):
    return PTDPStrategy(tensor_parallel_size=t, pipeline_parallel_size=p, micro_batch_size=2)


def come_and_leave(sizes, source, target):
    """Predict with the weights of a folder, train a step from there and save; what was read, and what is held."""
    num_bytes = []

    def counting(files, wanted, read=SafetensorsFiles.read):
        num_bytes.append(read(files, wanted))
        return num_bytes[-1]

    with patch.object(SafetensorsFiles, "read", counting):
        trainer = quiet_trainer(strategy(*sizes))
        logits = trainer.predict(Wrapper(), DataLoader(IDS, batch_size=4), ckpt_path=source)
    trainer = quiet_trainer(strategy(*sizes))
    module = Wrapper()
    trainer.fit(module, datamodule=ReplicaBatches([texts(4, vocabulary=VOCABULARY)]), ckpt_path=source)
    trainer.save_checkpoint(target)
    owned = trainer.strategy.engine.parameters.names
    return torch.cat(logits), num_bytes, sum(parameter.nbytes for parameter in owned)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_from_hugging_face_and_go_back_with_the_same_bits(layout, pretrained, tmp_path):
    (t, p), (folder, model) = LAYOUTS[layout], pretrained
    saved, out = str(tmp_path / "last.ckpt"), str(tmp_path / "hf")
    ranks = run_spmd(come_and_leave, world_size=t * p, timeout=120, sizes=(t, p), source=str(folder), target=saved)
    with torch.no_grad():
        expected = model(IDS).logits
    for logits, num_bytes, held in ranks:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        assert num_bytes == [held], "each rank reads what it holds, once"
    assert run([saved, out, "--to=hf", f"--module={__name__}.Wrapper"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert back.transformer.wte.weight.shape == (VOCABULARY, 16)
    assert same(dict(back.state_dict()), dict(model.state_dict()))


def predict(source):
    return torch.cat(quiet_trainer(strategy(1, 2)).predict(Wrapper(), DataLoader(IDS, batch_size=4), ckpt_path=source))


def test_weights_of_a_base_model_are_found_too(pretrained, tmp_path):
    model = pretrained[1]
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in SafetensorsFiles(tmp_path).file_of
    with torch.no_grad():
        expected = model(IDS).logits
    for logits in run_spmd(predict, world_size=2, timeout=60, source=str(tmp_path)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


# -- weights that do not fit -------------------------------------------------------------------------------------------


class WithHead(Wrapper):
    """Has a part beside the model of transformers, which no file of that has."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale


class Deeper(Wrapper):
    """Has a layer more than the file."""

    def __init__(self):
        super().__init__()
        config = self.model.config
        config.n_layer = 3
        self.model = transformers.GPT2LMHeadModel(config)


class Lenient(Deeper):
    """As that, and lets weights be missing."""

    def __init__(self):
        super().__init__()
        self.strict_loading = False


class Wider(Wrapper):
    """Has more tokens than the file."""

    def __init__(self):
        super().__init__()
        config = self.model.config
        config.vocab_size = 64
        self.model = transformers.GPT2LMHeadModel(config)


def fit_from(make, source):
    try:
        quiet_trainer(strategy(1, 2)).fit(
            make(), datamodule=ReplicaBatches([texts(4, vocabulary=61)]), ckpt_path=source
        )
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (WithHead, ""),
        (Lenient, ""),
        (Deeper, "missing ['model.transformer.h.2."),
        (Wider, "has the size (61, 16) in"),
    ],
)
def test_weights_that_the_model_lacks_are_told_on_every_rank(make, message, pretrained):
    for told in run_spmd(fit_from, world_size=2, timeout=60, make=make, source=str(pretrained[0])):
        assert message in told
        assert bool(told) == bool(message)


class Experts(Wrapper):
    """Has a mixture of experts, which files hold one by one."""

    def __init__(self):
        super().__init__()
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=2,
        )
        self.model = transformers.MixtralForCausalLM(config)
        self.strict_loading = False


def test_tensors_that_transformers_puts_together_are_refused(tmp_path):
    Experts().model.save_pretrained(tmp_path)
    for told in run_spmd(fit_from, world_size=2, timeout=60, make=Experts, source=str(tmp_path)):
        assert "the files have no ['model.model.layers.0.mlp." in told
        assert "let the module build it by from_pretrained" in told


def test_damaged_file_is_named_on_every_rank(pretrained, tmp_path):
    folder = shutil.copytree(pretrained[0], tmp_path / "damaged")
    damaged = sorted(folder.glob("model-*.safetensors"))[2]
    damaged.write_bytes(damaged.read_bytes()[:40])
    for told in run_spmd(fit_from, world_size=2, timeout=60, make=Wrapper, source=str(folder)):
        assert f"{damaged} is missing or damaged" in told


# -- one file ----------------------------------------------------------------------------------------------------------

BATCHES = [
    {"input_ids": batch["ids"], "labels": batch["labels"]}
    for batch in (texts(4, vocabulary=VOCABULARY, seed=i) for i in range(4))
]
SIZES = {"vocab_size": VOCABULARY, "max_seq_len": 16, "num_layers": 2, "hidden_size": 16, "num_heads": 4}


def train_recipe(sizes, batches, save=None, resume=None):
    seed_everything()
    losses = Losses()
    trainer = quiet_trainer(
        strategy(*sizes) if sizes else "auto",
        callbacks=[losses],
        precision="64-true",
        max_epochs=2 if resume else 1,
    )
    module = GPTModule(**SIZES, learning_rate=1e-2, warmup_steps=10)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You defined a `validation_step`")
        warnings.filterwarnings("ignore", message="It is recommended to use `self.log")  # of the world around one rank
        trainer.fit(module, datamodule=ReplicaBatches(batches), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return losses.losses


def test_one_file_of_t2_p2_goes_on_in_a_plain_trainer(tmp_path, capsys):
    saved, file = str(tmp_path / "last.ckpt"), str(tmp_path / "plain.ckpt")
    run_spmd(train_recipe, world_size=4, timeout=60, sizes=(2, 2), batches=BATCHES[:2], save=saved)
    assert run([saved, file]) == 0
    assert same(torch.load(file, weights_only=True), read_checkpoint(saved))
    resumed = train_recipe(None, BATCHES[2:], resume=file)
    assert resumed == pytest.approx(train_recipe(None, BATCHES)[2:], abs=1e-10)
    module = GPTModule.load_from_checkpoint(file, strict=True, weights_only=True)
    assert module.net.head.weight.shape == (VOCABULARY, 16)

    assert run([saved, file, "--weights-only", "--force"]) == 0
    weights = torch.load(file, weights_only=True)
    assert "optimizer_states" not in weights
    assert same(weights["state_dict"], read_checkpoint(saved)["state_dict"])

    shard = next((tmp_path / "last.ckpt").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    before = sorted(tmp_path.iterdir())
    assert run([saved, file, "--force"]) == 1
    assert str(shard) in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert same(torch.load(file, weights_only=True), weights)
