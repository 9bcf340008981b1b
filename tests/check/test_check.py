"""Layouts of right modules pass: every model of the tests, the recipe, and models of transformers."""

from functools import partial

import pytest
import torch
from lightning_ptdp.recipes.gpt import GPTModule

import lightning_ptdp
from lightning_ptdp import ParallelConfig
from tests.hygiene import seed_everything
from tests.models import GPT, PairNet, TableNet, TokenCosts, ValidatedGPT, points, texts, token_costs
from tests.oracle import parallel
from tests.trainer.test_layouts import PLAN
from tests.trainer.test_tensor_parallel import SEQUENCE_PLAN


def check(make, batch, *, t=1, p=1, d=1, v=1, b="auto", **options):
    seed_everything()
    return lightning_ptdp.check(
        make(),
        batch,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        data_parallel_size=d,
        virtual_pipeline_size=v,
        micro_batch_size=b,
        **options,
    )


def recipe_batch():
    batch = texts(4, vocabulary=61)
    return {"input_ids": batch["ids"], "labels": batch["labels"]}


RECIPE = partial(GPTModule, vocab_size=61, max_seq_len=16, num_layers=4, hidden_size=32, num_heads=4, dropout=0.1)
COSTS = token_costs((8, 1.0), (2, 3.0), (5, 2.0), (1, 7.0))

RIGHT = {
    "everything": (GPT, texts(8), {"t": 2, "p": 2, "v": 2, "d": 2, "b": 1, "tensor_parallel_plan": PLAN}),
    "tied, uneven, padded": (
        partial(GPT, tied=True, vocabulary=61),
        texts(5, vocabulary=61, padded=True),
        {"t": 2, "p": 2, "d": 2, "b": 2, "tensor_parallel_plan": PLAN},
    ),
    "extras, gpipe": (ValidatedGPT, texts(4, extras=True), {"p": 2, "b": 1, "schedule": "gpipe"}),
    "sequence parallel": (
        GPT,
        texts(4),
        {"t": 2, "p": 2, "sequence_parallel": True, "tensor_parallel_plan": SEQUENCE_PLAN},
    ),
    "asked split": (GPT, texts(4), {"p": 2, "pipeline_split": [1, 3], "pipeline_blocks": "blocks"}),
    "dropout": (partial(GPT, dropout=0.5), texts(4), {"t": 2, "p": 2, "tensor_parallel_plan": PLAN}),
    "tuples": (PairNet, points(8), {"p": 4, "d": 2}),
    "shared table": (TableNet, points(8), {"p": 4, "shared": ["table"]}),
    "token costs": (TokenCosts, COSTS, {"p": 2, "b": 1}),
    "weighted token costs": (partial(TokenCosts, kind="weight"), COSTS, {"p": 2, "d": 2, "b": 1}),
    "recipe": (RECIPE, recipe_batch(), {"t": 2, "p": 2, "v": 2, "d": 2}),
    "recomputed": (
        GPT,
        texts(4),
        {"t": 2, "p": 2, "v": 2, "d": 2, "b": 1, "recompute": "full", "tensor_parallel_plan": PLAN},
    ),
    "scores recomputed": (GPT, texts(4), {"t": 2, "p": 2, "recompute": "selective", "tensor_parallel_plan": PLAN}),
    "recomputed in one process": (partial(GPT, dropout=0.5), texts(3), {"recompute": "full", "recompute_every": 2}),
    "one process": (GPT, texts(3), {}),
}


@pytest.mark.parametrize(("make", "batch", "options"), RIGHT.values(), ids=RIGHT)
def test_right_layout_passes(make, batch, options):
    report = check(make, batch, **options)
    report.raise_if_different()
    assert report.ok
    assert report.parameters
    assert all(parameter.relative < 1e-10 for parameter in report.parameters)
    assert "This layout computes what one process computes." in str(report)
    assert ("dropout was off" in str(report)) == (make is RECIPE or "dropout" in getattr(make, "keywords", {}))


class CountedGPT(GPT):
    """Counts the forwards of a module within its first block, over all copies."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.blocks[0].down.register_forward_pre_hook(self.count)

    @staticmethod
    def count(*_):
        CountedGPT.runs += 1


@pytest.mark.parametrize(("recompute", "runs"), [("none", 2), ("full", 3)])
def test_a_check_recomputes_as_the_run_would(recompute, runs):
    CountedGPT.runs = 0
    check(CountedGPT, texts(4), recompute=recompute).raise_if_different()
    assert CountedGPT.runs == runs  # whole, split, and split again


def test_a_configuration_is_checked_and_changed_by_name():
    config = ParallelConfig(
        tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=1, tensor_parallel_plan=PLAN
    )
    report = lightning_ptdp.check(GPT(), texts(4), config, micro_batch_size=1)
    report.raise_if_different()
    assert report.num_microbatches == 4
    assert report.layout.startswith("tensor 2 x pipeline 2 x data 1")
    with pytest.raises(TypeError, match="tensor_size"):
        lightning_ptdp.check(GPT(), texts(4), config, tensor_size=1)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("has_own_loss", [False, True])
def test_model_of_transformers_passes(name, has_own_loss):
    pytest.importorskip("transformers")
    models = pytest.importorskip("tests.trainer.test_transformers")
    batch = texts(4, length=8, vocabulary=61)
    make = partial(models.LanguageModel, getattr(models, name), has_own_loss)
    check(make, batch, t=2, p=2, b=2).raise_if_different()


def test_run_in_threads_gives_the_numbers_of_processes():
    batch = texts(4)
    layout = {"tensor_parallel_plan": PLAN, "micro_batch_size": 2}
    run, _ = parallel(GPT, [batch], tensor_parallel_size=2, pipeline_parallel_size=2, **layout)
    report = check(GPT, batch, t=2, p=2, b=2, tensor_parallel_plan=PLAN)
    assert report.loss_split == run.losses[0]
    sizes = {parameter.name: parameter.size for parameter in report.parameters}
    assert sizes == pytest.approx({name: g.abs().max().item() for name, g in run.gradients[0].items()}, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "shown"), [(torch.float32, "float32"), (None, "float32"), (torch.float64, "float64")]
)
def test_dtype_is_asked_for(dtype, shown):
    report = check(GPT, texts(4), t=2, tensor_parallel_plan=PLAN, dtype=dtype)
    assert report.ok
    assert report.dtype == shown
    assert report.tolerance == {"float32": 1e-3, "float64": 1e-6}[shown]


def test_tolerance_is_asked_for():
    report = check(GPT, texts(4), p=2, d=2, tolerance=0.0)
    assert not report.ok  # sums in another order
    assert report.tolerance == 0.0


def test_all_faults_of_a_layout_are_told_at_once():
    report = check(partial(GPT, hidden=12), texts(2), t=3, p=5, d=4, schedule="zigzag", tensor_parallel_plan=PLAN)
    assert not report.ok
    text = str(report)
    assert "schedule must be one of" in text
    assert "each of the p * v = 5 stages needs a block, and 'blocks' has 4" in text
    assert "'blocks.0.attention.query' has 4 heads, and tensor_parallel_size=3" in text
    assert "each of data_parallel_size=4 replicas needs a row of the batch, and it has 2" in text
    with pytest.raises(RuntimeError, match="the layout cannot run"):
        report.raise_if_different()


def test_automatic_sizes_are_a_fault():
    assert "tensor_parallel_size='auto' depends on the processes of a run" in str(check(GPT, texts(2), t="auto"))


class Manual(PairNet):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_a_fault():
    assert "manual optimization" in str(check(Manual, points(4)))


def test_error_of_the_module_itself_is_raised_as_it_is():
    class Broken(PairNet):
        def training_step(self, batch, batch_idx):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check(Broken, points(4), p=2)


def test_step_without_a_loss_is_refused():
    class Lossless(PairNet):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ValueError, match="training_step must return a loss of one number"):
        check(Lossless, points(4), p=2)


class OnlyFloat32(PairNet):
    """Makes float32 numbers whatever its weights are."""

    def training_step(self, batch, batch_idx):
        return super().training_step({name: column.float() for name, column in batch.items()}, batch_idx)


def test_module_that_cannot_run_in_float64_is_checked_in_its_own_dtype():
    report = check(OnlyFloat32, points(4), p=2)
    assert report.ok
    assert report.dtype == "float32"
    assert "the step does not run in float64" in str(report)
