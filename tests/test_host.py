"""Every private name of the hosts that the package uses is there, and is what we rely on, in the installed versions."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning.fabric.utilities.types
import lightning.pytorch as pl
import lightning.pytorch.overrides.distributed
import lightning.pytorch.utilities.data
import pytest
import torch
import torch._dynamo
import torch._ops
import torch._subclasses.fake_tensor
import torch.distributed.checkpoint as dcp
import torch.nn.init
import torch.utils._python_dispatch
import torch.utils._pytree
import torchmetrics
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, launchers
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_ptdp.host import lightning as host_lightning
from lightning_ptdp.host import torch as host_torch
from lightning_ptdp.host import torchmetrics as host_torchmetrics

HOST = Path(__file__).parent.parent / "lightning_ptdp" / "host"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """Where a private name is, why no public one does its work, and what its value has to be.

    holder: what has the name, or a function that makes it. is_fine: takes the value.
    """

    holder: object
    reason: str
    is_fine: Callable[[object], bool] = callable


def is_none(value):
    return value is None


def takes(*names):
    """A function that has these arguments."""
    return lambda value: set(names) <= set(inspect.signature(value).parameters)


def is_a(kind):
    return lambda value: isinstance(value, kind)


def has(*names):
    return lambda value: all(hasattr(value, name) for name in names)


def with_hyperparameters():
    module = pl.LightningModule()
    module.save_hyperparameters({"a": 1})
    return module


def with_trainers_argument():
    return pl.Trainer(accelerator="cpu", logger=False, use_distributed_sampler=False, enable_checkpointing=False)


linear, loader = nn.Linear(1, 1), DataLoader([1, 2])
overrides = lightning.pytorch.overrides.distributed
NAMES = {
    # torch
    "_pytree": PrivateName(
        torch.utils,
        "the registry of containers has no public name",
        has("tree_map", "tree_map_only", "tree_leaves", "tree_flatten", "tree_unflatten"),
    ),
    "_python_dispatch": PrivateName(
        torch.utils, "torch's notes on extending it teach the mode in there", has("TorchDispatchMode")
    ),
    "_ops": PrivateName(torch, "the type of what a TorchDispatchMode is given", has("OpOverload")),
    "_subclasses": PrivateName(torch, "loading without values", lambda value: has("FakeTensorMode")(value.fake_tensor)),
    "_BatchNorm": PrivateName(nn.modules.batchnorm, "public are only the classes derived from it", is_a(type)),
    "_NormBase": PrivateName(nn.modules.batchnorm, "public are only the classes derived from it", is_a(type)),
    "_schema": PrivateName(
        torch.ops.aten.add_.Tensor,
        "what an operation edits",
        lambda value: value.arguments[0].alias_info.is_write and value.is_mutable and value.name == "aten::add_",
    ),
    "_version": PrivateName(torch.zeros(2).add_(1), "how often a tensor was edited", lambda value: value == 1),
    "_get_current_function_mode_stack": PrivateName(
        torch.overrides, "the modes that a second forward runs under", lambda value: value() == []
    ),
    "_C": PrivateName(torch, "a subclass as a plain tensor", has("DisableTorchFunctionSubclass")),
    "_no_grad_trunc_normal_": PrivateName(nn.init, "trunc_normal_ is imported by name, this is not", takes("tensor")),
    "_parameters": PrivateName(linear, "order of registration", lambda value: list(value) == ["weight", "bias"]),
    "_buffers": PrivateName(
        nn.BatchNorm1d(1),
        "a buffer is replaced in place",
        lambda value: list(value) == ["running_mean", "running_var", "num_batches_tracked"],
    ),
    "_modules": PrivateName(nn.Sequential(linear, linear), "repeats are kept", lambda value: list(value) == ["0", "1"]),
    "_compiled_call_impl": PrivateName(linear, "what module.compile() made", is_none),
    "_dynamo": PrivateName(torch, "what torch.compile made", has("OptimizedModule")),
    "_checkpoint_offset": PrivateName(torch.UntypedStorage, "where values lie in a file", is_none),
    "_slice_file": PrivateName(dcp.FileSystemReader, "the format of DCP's files", takes("file", "sinfo")),
    "_iterator": PrivateName(loader, "the workers that a loader keeps", is_none),
    # torchmetrics
    "_update_count": PrivateName(torchmetrics.MeanMetric(), "update_count only tells", lambda value: value == 0),
    "_computed": PrivateName(torchmetrics.MeanMetric(), "what compute returned is kept", is_none),
    "_forward_cache": PrivateName(torchmetrics.MeanMetric(), "what self.log shows for a step", is_none),
    "_to_sync": PrivateName(torchmetrics.MeanMetric(), "the copy of sync_on_compute", lambda value: value is True),
    # Lightning
    "_SubprocessScriptLauncher": PrivateName(launchers, "has no public name", takes("num_processes", "num_nodes")),
    "_Stateful": PrivateName(
        lightning.fabric.utilities.types, "has no public name", has("state_dict", "load_state_dict")
    ),
    "_trainer": PrivateName(pl.LightningModule(), "the public name raises without a Trainer", is_none),
    "_current_fx_name": PrivateName(pl.LightningModule(), "which hook runs", is_none),
    "_hparams": PrivateName(with_hyperparameters, "what save_hyperparameters sets later", has()),
    "_hparams_name": PrivateName(with_hyperparameters, "what save_hyperparameters sets later", has()),
    "_hparams_initial": PrivateName(with_hyperparameters, "what save_hyperparameters sets later", has()),
    "_layer_sync": PrivateName(DDPStrategy(), "the Trainer's sync_batchnorm", is_none),
    "_accelerator_connector": PrivateName(
        with_trainers_argument,
        "the Trainer's use_distributed_sampler",
        lambda value: value.use_distributed_sampler is False,
    ),
    "_after_closure": PrivateName(Precision, "follows hooks and clipping", takes("model", "optimizer")),
    "_IndexBatchSamplerWrapper": PrivateName(overrides, "what Lightning predicts with", is_a(type)),
    "_batch_sampler": PrivateName(
        overrides._IndexBatchSamplerWrapper(BatchSampler([0, 1], 1, False)),
        "what an _IndexBatchSamplerWrapper draws from",
        is_a(BatchSampler),
    ),
    "_update_dataloader": PrivateName(
        lightning.pytorch.utilities.data, "a user's loader made again", takes("dataloader", "sampler", "mode")
    ),
    "_average_model": PrivateName(shipped.WeightAveraging(), "the averaged copy", is_none),
    "_scheduler_state": PrivateName(shipped.StochasticWeightAveraging(0.1), "a loaded schedule", is_none),
    "_throughputs": PrivateName(shipped.ThroughputMonitor(lambda batch: 1), "its counters", is_a(dict)),
    "_max_depth": PrivateName(shipped.ModelSummary(max_depth=3), "its argument", lambda value: value == 3),
    "_summary": PrivateName(shipped.ModelSummary, "what it shows", takes("trainer", "pl_module")),
    "_get_summary_data": PrivateName(pl.utilities.model_summary.ModelSummary, "the rows of a summary"),
}


@pytest.mark.parametrize("name", NAMES)
def test_private_name_is_there(name):
    row = NAMES[name]
    holder = row.holder() if inspect.isfunction(row.holder) else row.holder
    assert row.is_fine(getattr(holder, name)), f"{name}: {row.reason}"


def test_table_names_what_host_uses():
    assert {name for path in HOST.glob("*.py") for name in private_names_in(path)} == set(NAMES)


def private_names_in(path):
    """Names with one underscore in a file: attributes, parts of imports, and texts that are names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - {"_data"}


def test_precision_is_told_after_hooks_and_clipping(monkeypatch):
    told = []

    class Told(host_lightning.HooksPrecision):
        def hooks_are_done(self):
            told.append("done")

    monkeypatch.setattr(Precision, "_after_closure", lambda *_: told.append("hooks and clipping"))
    Told().end_closure(None, None)
    assert told == ["hooks and clipping", "done"]


def test_metric_with_a_count_forgets_what_it_computed():
    metric = torchmetrics.SumMetric()
    metric.update(2.0)
    assert metric.compute() == 2
    metric.sum_value = torch.tensor(5.0)
    host_torchmetrics.set_update_count(metric, 3)
    assert (metric.update_count, metric.compute()) == (3, 5)


def test_compiled_module_is_known():
    plain, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    assert [host_torch.is_compiled(m) for m in (plain, in_place, torch.compile(plain, backend="eager"))] == [
        False,
        True,
        True,
    ]
