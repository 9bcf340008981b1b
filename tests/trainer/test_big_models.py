"""init="by_operation": a rank computes the weights that it owns, and they are the same under every layout."""

import gc
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, llama_config, texts
from tests.oracle import Recorder, ReplicaBatches, assert_same, join, parallel, quiet_trainer, train
from tests.spmd import SpmdError, run_spmd
from tests.trainer.test_layouts import PLAN

BATCHES = [texts(4, seed=i) for i in range(3)]
INIT = {"init": "by_operation", "micro_batch_size": 1}
LAYOUTS = {
    "t2": {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN},
    "p2v2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "d2": {"data_parallel_size": 2},
    "t2p2": {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN, "pipeline_parallel_size": 2},
}


class LateGPT(GPT):
    """Builds its layers in `configure_model`, with a tied head and an initialisation of its own."""

    def __init__(self, *, tied=True):
        pl.LightningModule.__init__(self)
        self.optimizer_name, self.lr, self.tied = "adamw", 0.01, tied
        self.example_input_array = torch.zeros(1, 16, dtype=torch.long)

    def configure_model(self):
        if hasattr(self, "blocks"):
            return
        built = GPT()
        for name, child in built.named_children():
            self.add_module(name, child)
        self.apply(self.initialise)
        if self.tied:
            self.head.weight = self.token.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, 6))
        self.register_buffer("table", torch.arange(16.0).cos(), persistent=False)
        self.halves = [self.table[:8], self.table[8:]]

    def initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    def training_step(self, batch, batch_idx):
        assert torch.equal(torch.cat(self.halves), self.table)
        assert self.table[1] == torch.ones(()).cos()
        return super().training_step(batch, batch_idx) * self.scale.mean()


@pytest.fixture(scope="module")
def one_process():
    return join(run_spmd(train, world_size=1, make=LateGPT, batches=BATCHES, trainer={}, strategy=INIT))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_have_the_same_bits_and_train_alike_under_every_layout(layout, one_process):
    run, _ = parallel(LateGPT, BATCHES, trainer={"enable_model_summary": True}, **INIT, **layout)
    assert_same(run, one_process)


def test_the_seed_of_rank_0_is_that_of_all(one_process):
    parts = run_spmd(train_seeded_by_rank, world_size=2)
    assert_same(join(parts), one_process)


def train_seeded_by_rank():
    return train(SeededByRank, BATCHES, {}, {**INIT, "pipeline_parallel_size": 2})


class SeededByRank(LateGPT):
    """Whose script seeds every process as it likes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(torch.distributed.get_rank())


def test_a_checkpoint_resumes_under_another_layout(tmp_path):
    path = tmp_path / "saved"
    whole = run_spmd(fit, world_size=2, layout={"pipeline_parallel_size": 2}, steps=4)
    run_spmd(fit, world_size=2, layout={"pipeline_parallel_size": 2}, steps=2, save=path)
    resumed = run_spmd(fit, world_size=2, layout=LAYOUTS["t2"], steps=4, resume=path)
    found, expected = join(resumed).weights[-1], join(whole).weights[-1]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


def fit(layout, steps, save=None, resume=None):
    recorder = Recorder()
    batches = [texts(4, seed=i) for i in range(2)]
    trainer = quiet_trainer(
        PTDPStrategy(**INIT, **layout),
        callbacks=[recorder],
        precision="64-true",
        use_distributed_sampler=False,
        max_epochs=steps // 2,
    )
    trainer.fit(LateGPT(), datamodule=ReplicaBatches(batches), ckpt_path=None if resume is None else str(resume))
    if save is not None:
        trainer.save_checkpoint(str(save))
    return recorder.part


class LateLlama(pl.LightningModule):
    """A model of transformers, whose own initialisation and rotary tables are put off."""

    def configure_model(self):
        if hasattr(self, "model"):
            return
        transformers = pytest.importorskip("transformers")
        self.model = transformers.AutoModelForCausalLM.from_config(llama_config())

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_of_transformers_has_the_weights_of_one_process():
    pytest.importorskip("transformers")
    batches = [texts(4, length=8, vocabulary=61, seed=i) for i in range(2)]
    one = join(run_spmd(train, world_size=1, make=LateLlama, batches=batches, trainer={}, strategy=INIT))
    run, _ = parallel(LateLlama, batches, tensor_parallel_size=2, pipeline_parallel_size=2, timeout=180.0, **INIT)
    assert one.initial.keys() == run.initial.keys()
    assert_same(run, one, tolerance=1e-6)  # its norms compute in float32


def test_a_module_that_was_fitted_is_tested_and_fitted_on():
    (alone,) = run_spmd(fit_test_fit, world_size=1, layout={})
    for losses in run_spmd(fit_test_fit, world_size=2):
        assert losses == pytest.approx(alone, abs=1e-10)


def fit_test_fit(layout=LAYOUTS["p2v2"]):
    """Losses of a test between two fits of the same module, and of one after them."""
    module, batches = Evaluated(), ReplicaBatches(BATCHES)
    losses = []
    for _ in range(2):
        trainer = quiet_trainer(PTDPStrategy(**INIT, **layout), precision="64-true", max_epochs=1)
        trainer.fit(module, datamodule=batches)
        losses.append(trainer.test(module, DataLoader([texts(4)], batch_size=None))[0]["loss"])
    return losses


class Evaluated(LateGPT):
    """With a test, too."""

    def test_step(self, batch, batch_idx):
        self.log("loss", super().training_step(batch, batch_idx))


class Built(LateGPT):
    """Builds nothing late."""

    def __init__(self):
        super().__init__()
        super().configure_model()

    def configure_model(self):
        """Nothing is left to do."""


class OnMeta(LateGPT):
    """Has a part without values."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Conv1d(4, 4, 1, device="meta")


class ByRank(LateGPT):
    """Initialises one way here and another there."""

    def configure_model(self):
        super().configure_model()
        nn.init.normal_(self.norm.weight, std=1.0 + torch.distributed.get_rank())


class Loaded(LateGPT):
    """Takes large weights from elsewhere."""

    def configure_model(self):
        super().configure_model()
        self.frozen = nn.Embedding.from_pretrained(torch.frombuffer(bytearray(80 << 20), dtype=torch.float32)[None])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Built, "it built no parameter or buffer; move the model from __init__ to configure_model"),
        (OnMeta, "'extra.weight', 'extra.bias' were built on the meta device outside of configure_model"),
        (ByRank, "all ranks must build the same module.*operations of configure_model"),
        (Loaded, "configure_model gave 'frozen.weight' values that no operation of torch made"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_built_is_refused_on_every_rank(make, said):
    with pytest.raises(SpmdError, match=rf"(?s){said}"):
        parallel(make, BATCHES, pipeline_parallel_size=2, **INIT)


def test_an_unknown_init_is_refused():
    with pytest.raises(SpmdError, match="init must be one of 'plain', 'by_operation'; got 'empty'"):
        parallel(LateGPT, BATCHES, init="empty")


class Wide(pl.LightningModule):
    """Blocks of one large matrix each, which is drawn twice."""

    def __init__(self, num_blocks, hidden):
        super().__init__()
        self.num_blocks, self.hidden = num_blocks, hidden

    def configure_model(self):
        self.blocks = nn.ModuleList(nn.Linear(self.hidden, self.hidden, bias=False) for _ in range(self.num_blocks))
        for block in self.blocks:
            nn.init.normal_(block.weight, std=0.02)
        self.built = resident_bytes()

    def predict_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch


def resident_bytes():
    """Memory that this process holds, now and at its peak since the last reset."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))


def peak_of_set_up(num_blocks, hidden, layout):
    """Bytes that predicting with the model took: until it was built, and at the peak."""
    predict(Wide(num_blocks, 64), layout)  # loads and compiles what is done once a process
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, _ = resident_bytes()
    module = Wide(num_blocks, hidden)
    predict(module, layout)
    return module.built[0] - before, resident_bytes()[1] - before


def predict(module, layout):
    loader = DataLoader(torch.ones(1, 1, module.hidden), batch_size=None)
    quiet_trainer(PTDPStrategy(init="by_operation", **layout)).predict(module, loader)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read off Linux's /proc")
@pytest.mark.parametrize(
    ("num_blocks", "layout"),
    [
        (12, {"pipeline_parallel_size": 4}),
        (6, {"tensor_parallel_size": 4, "tensor_parallel_plan": {"blocks.*": "colwise_gather_output"}}),
    ],
    ids=["p4", "t4"],
)
def test_set_up_takes_a_ranks_part_and_one_matrix_more(num_blocks, layout):
    hidden, mib = 3072, 1 << 20
    matrix = hidden * hidden * 4  # bytes; large enough for malloc to give it back to the system at once
    found = run_spmd(peak_of_set_up, world_size=4, timeout=120, num_blocks=num_blocks, hidden=hidden, layout=layout)
    share = num_blocks * matrix // 4
    for built, peak in found:
        assert built < 4 * mib
        assert share < peak < share + matrix + 24 * mib  # half of the whole, at most
