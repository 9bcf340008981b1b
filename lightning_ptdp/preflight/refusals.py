"""Refuses, before anything starts, what a module or its optimizers do and no split of the model could get right."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.host.torch import BatchNorm
from lightning_ptdp.names import first_few
from lightning_ptdp.preflight.optimizer_probe import Verdict, judge
from lightning_ptdp.topology import Topology

_ELSE = (
    "use an optimizer that treats each element alone (AdamW, SGD), or tensor_parallel_size=1, pipeline_parallel_size=1 "
    "and no distributed_optimizer"
)


def refused_modules(module: pl.LightningModule, topology: Topology, *, trains: bool) -> list[str]:
    """Find what is wrong with a module, however it is split; returns a sentence for each fault.

    Args:
        module: the user's.
        topology: the sizes.
        trains: whether it is to be fitted.
    """
    faults = _refused_tensors(module, topology)
    if trains:
        faults += _refused_steps(module, topology)
    return faults


def _refused_steps(module: pl.LightningModule, topology: Topology) -> list[str]:
    """Refuse steps that cannot be called once a microbatch and stage."""
    step, p, faults = module.training_step, topology.pipeline_parallel_size, []
    if inspect.isgeneratorfunction(step) or inspect.iscoroutinefunction(step):
        kind = "generator" if inspect.isgeneratorfunction(step) else "coroutine"
        faults.append(f"training_step is a {kind} function, and its loss would never be computed; let it return one")
    if p > 1 and not module.automatic_optimization:
        faults.append(
            "manual optimization runs backward inside training_step, where only the last stage arrives; use "
            "automatic optimization, or pipeline_parallel_size=1"
        )
    if p > 1:
        faults += [
            f"{name} takes dataloader_iter, and a pipeline must see the batch before the step runs, to cut it; take "
            f"the batch instead, or use pipeline_parallel_size=1 (it is {p})"
            for name in ("training_step", "validation_step", "test_step", "predict_step")
            if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True)
        ]
    return faults


def _refused_tensors(module: nn.Module, topology: Topology) -> list[str]:
    """Refuse parameters of a class of tensors of their own, such as quantised ones, where parameters are split."""
    if topology.tensor_parallel_size * topology.pipeline_parallel_size == 1:
        return []
    strange = {name: type(p.data).__name__ for name, p in module.named_parameters() if type(p.data) is not Tensor}
    if not strange:
        return []
    kinds = ", ".join(sorted(set(strange.values())))
    return [
        f"{_listed(list(strange))} are tensors of a kind of their own ({kinds}), which cannot be cut or left out; "
        "load the module with plain tensors, or use tensor_parallel_size=1 and pipeline_parallel_size=1"
    ]


def batch_norm_warning(module: nn.Module, topology: Topology, config: ParallelConfig) -> str | None:
    """Warn of batch norms that train on microbatches; None if they see a replica's batch, or if there are none."""
    names = [name for name, child in module.named_modules() if isinstance(child, BatchNorm)]
    if not names or (topology.pipeline_parallel_size == 1 and config.micro_batch_size == "auto"):
        return None
    return (
        f"the statistics of {_listed(names)} ({len(names)} batch norms) are those of a microbatch, as under gradient "
        "accumulation, and not those of the batch in one process; use LayerNorm or GroupNorm, or micro_batch_size= the "
        "batch size of a replica"
    )


def foreign_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Refuse parameters that optimizers hold and the module does not: they have no name to be saved or split by."""
    known = set(module.parameters())
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    strange = [list(p.shape) for p in held if p not in known]
    if not strange:
        return []
    return [
        f"configure_optimizers gives an optimizer {len(strange)} parameters (of shapes {_listed(strange)}) that the "
        "module does not have; register them (assign to self, or use nn.ParameterList or nn.ModuleList), or pass "
        "self.parameters()"
    ]


def refused_optimizers(optimizers: Sequence[Optimizer], topology: Topology, *, shards: bool) -> list[str]:
    """Refuse optimizers that compute something else on a part of the model; returns a sentence for each.

    Args:
        optimizers: what the user configured.
        topology: the sizes.
        shards: whether each replica steps pieces of parameters (distributed_optimizer).
    """
    t, p = topology.tensor_parallel_size, topology.pipeline_parallel_size
    shards = shards and topology.data_parallel_size > 1
    if t * p == 1 and not shards:
        return []
    told = [_refused_optimizer(optimizer, t, p, shards=shards) for optimizer in optimizers]
    return [fault for fault in dict.fromkeys(told) if fault]


def refused_manual_optimization(module: pl.LightningModule, *, shards: bool, has_main_weights: bool) -> list[str]:
    """Refuse what manual optimization cannot have; returns a sentence for each.

    Args:
        module: the user's.
        shards: whether each replica steps pieces of parameters (distributed_optimizer).
        has_main_weights: whether 16-bit weights are stepped as copies in float32.
    """
    if module.automatic_optimization:
        return []
    asked = {"distributed_optimizer=True": shards, "16-bit weights (precision *-true)": has_main_weights}
    return [
        f"{what} steps main weights in place of the module's parameters, whose gradients manual optimization leaves on "
        "the parameters; use automatic optimization, or leave it out"
        for what, is_asked in asked.items()
        if is_asked
    ]


def _refused_optimizer(optimizer: Optimizer, t: int, p: int, *, shards: bool) -> str:
    """Say why an optimizer cannot step its part of the model alone; "" if it can."""
    name = type(optimizer).__name__
    sizes = f"tensor_parallel_size={t}" if t > 1 else f"pipeline_parallel_size={p}"
    if t * p == 1:
        sizes = "distributed_optimizer=True"
    if type(optimizer) is LBFGS:
        return (
            f"LBFGS searches along one direction for the whole model, and {sizes} gives a rank a part of it; " + _ELSE
        )
    if type(optimizer) is SparseAdam:
        return "SparseAdam takes sparse gradients, and a parallel run adds them up in dense buffers; use Adam"
    verdict = judge(optimizer)
    if verdict.unknown:
        return _unknown(name, verdict, sizes)
    if not verdict.is_parameterwise:
        return (
            f"{name} steps a parameter otherwise when it steps others with it ({_percent(verdict.apart)} of a step, on "
            f"small parameters), and {sizes} gives a rank some of them; {_ELSE}"
        )
    if (t > 1 or shards) and not verdict.is_elementwise:
        what = f"tensor_parallel_size={t}" if t > 1 else "distributed_optimizer=True"
        return (
            f"{name} steps a piece of a matrix otherwise than the whole ({_percent(verdict.in_pieces)} of a step, on "
            f"small parameters), and {what} cuts matrices; {_ELSE}"
        )
    return ""


def _unknown(name: str, verdict: Verdict, sizes: str) -> str:
    return (
        f"{name} could not be tried on small parameters ({verdict.unknown}), so nobody knows whether it steps each "
        f"element alone, as {sizes} needs; if it does, say so by an attribute is_elementwise = True of its class; else "
        + _ELSE
    )


def _percent(fraction: float) -> str:
    return "off by all" if math.isinf(fraction) else f"off by {fraction:.0%}"


def _listed(things: Sequence[object]) -> str:
    return first_few(map(repr, things))
