"""`check`, which finds out whether a layout computes what one process computes, and its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_ptdp.check.compare import Comparison, compare
from lightning_ptdp.check.copies import Original
from lightning_ptdp.check.reasons import Trial, explain, explain_error
from lightning_ptdp.check.report import ParameterReport, Report
from lightning_ptdp.check.runs import SplitRun, WholeRun, run_split, run_whole
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.engine.microbatches import num_samples
from lightning_ptdp.layout import Layout, describe, lay_out, layout_of
from lightning_ptdp.schedule import SCHEDULES
from lightning_ptdp.topology import Topology

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}  # modules may compute in float32 inside, whatever they hold
_COARSE = 5e-2  # tolerance of 16-bit numbers

ONE_PROCESS = ParallelConfig(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)


def check(
    module: pl.LightningModule,
    batch: Any,
    config: ParallelConfig | None = None,
    *,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    **settings: Any,
) -> Report:
    """Run one training step whole and as the strategy would split it, and compare the loss and every gradient.

    All in this process, on the host, on copies: the ranks of the layout are threads that take turns. Dropout is off.

    Args:
        module: as it would be given to `Trainer.fit`.
        batch: a global one, which is cut into one part for each replica: it has the rows of a loader's batch times
            `data_parallel_size`.
        config: the layout, such as that of a strategy, `strategy.config`; None is one process.
        dtype: of floating numbers in the copies; None keeps the module's.
        tolerance: relative; None takes 1e-6 in float64, 1e-3 in float32, 5e-2 in 16 bits.
        settings: arguments of `PTDPStrategy` by name, such as `tensor_parallel_size=2`, in place of the config's.

    Returns:
        A report, which prints as a table. Of a layout that cannot run it holds all the faults.

    Raises:
        TypeError: a setting is none of the strategy's.
        ValueError: the module cannot be copied.
        Exception: what the module's own step raises on the whole batch.
    """
    asked = replace(ONE_PROCESS if config is None else config, **settings)
    ready = Original(module, batch, dtype).after_transfer()
    return check_layout(module, ready, asked, dtype=dtype, tolerance=tolerance)


def check_layout(
    module: pl.LightningModule,
    batch: Any,
    config: ParallelConfig,
    *,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
) -> Report:
    """Do what `check` does, with a configuration and a batch that are complete.

    Args:
        module: as it would be given to `Trainer.fit`.
        batch: a global one as `training_step` gets it, after the module's transfer hooks.
        config: what `PTDPStrategy` has made of its arguments.
        dtype: of floating numbers in the copies; None keeps the module's.
        tolerance: relative; None takes that of the gradients' dtype.
    """
    original = Original(module, batch, dtype)
    copied = original.make_module()
    faults = [*config.faults(SCHEDULES), *_size_faults(config)]
    topology, _ = config.resolve(0)
    layout, more = lay_out(copied, config, topology)
    faults += more + _faults_of(copied, batch, topology)
    if faults:
        return Report(type(module).__name__, _describe(layout, config), faults=tuple(dict.fromkeys(faults)))
    seed = torch.initial_seed()
    original, whole, notes = _run_whole(original, seed)
    trial = Trial(original, config, topology, seed, _tolerance(whole) if tolerance is None else tolerance)
    return _report(trial, layout, whole, run_split(original, config, layout, seed=seed), notes)


def _size_faults(config: ParallelConfig) -> list[str]:
    """Refuse sizes that a run chooses by its processes; returns a sentence for each."""
    return [
        f"{name}='auto' depends on the processes of a run, which a check has not; give a number"
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        if getattr(config, name) == "auto"
    ]


def _faults_of(module: pl.LightningModule, batch: Any, topology: Topology) -> list[str]:
    """Find why this module cannot be checked with this batch; returns a sentence for each reason."""
    faults = []
    if layout_of(module) is not None:
        faults.append("the module was split by an earlier run, and holds only a part of its weights; check a new one")
    if not module.automatic_optimization:
        faults.append(
            "manual optimization runs its backward where it likes, and a check compares one backward of one loss; a "
            "pipeline refuses it, and without one it is what it is in DDP"
        )
    rows, d = num_samples(batch), topology.data_parallel_size
    if rows < d:
        faults.append(
            f"each of data_parallel_size={d} replicas needs a row of the batch, and it has {rows}; give a batch of "
            f"{d} rows or more"
        )
    return faults


def _run_whole(original: Original, seed: int) -> tuple[Original, WholeRun, list[str]]:
    """Run the step in one process, in the module's own dtypes if it cannot run in the one asked for.

    Returns:
        The original that ran; its run; remarks for the user.
    """
    try:
        return original, run_whole(original, seed=seed), []
    except RuntimeError as error:
        if original.dtype is None:
            error.add_note("raised by the step on the whole batch, in one process")
            raise
        own = Original(original.module, original.batch, None)
        whole = run_whole(own, seed=seed)
        said = str(error).strip().splitlines()[0]
        return own, whole, [f"the step does not run in {_short(original.dtype)} ({said}); its own dtypes were taken"]


def _report(trial: Trial, layout: Layout, whole: WholeRun, split: SplitRun, notes: Sequence[str]) -> Report:
    """Compare both runs, look for reasons if they differ, and put all of it into a report."""
    dropout = ["dropout was off in both: whole and split would draw other masks"] if whole.has_dropout else []
    report = Report(
        module=type(trial.original.module).__name__,
        layout=_describe(layout, trial.config),
        num_rows=whole.num_rows,
        num_microbatches=max((part.num_microbatches for part in split.parts), default=0),
        dtype=" and ".join(sorted({_short(dtype) for dtype in _dtypes(whole)})),
        tolerance=trial.tolerance,
        loss_whole=whole.loss,
        notes=(*notes, *dropout),
    )
    if split.error is not None:
        failed = replace(trial, error=str(split.error))
        return replace(report, error=_told(split, layout), reasons=tuple(explain_error(failed, whole)))
    found, stages = compare(whole, split), _stages(trial.original.make_module(), layout)
    names = sorted(found, key=lambda name: (not math.isnan(found[name].relative), -found[name].relative))
    differing = [name for name in names if not found[name].relative <= trial.tolerance]
    report = replace(report, loss_split=split.parts[0].loss)
    reasons, others = explain(trial, whole, differing) if differing or not report.has_same_loss else ({}, [])
    return replace(
        report,
        parameters=tuple(
            _of_parameter(n, found[n], layout, stages[n], is_same=n not in differing, reason=reasons.get(n, ""))
            for n in names
        ),
        reasons=tuple(dict.fromkeys([*others, *reasons.values()])),
    )


def _of_parameter(
    name: str, found: Comparison, layout: Layout, stages: tuple[int, ...], *, is_same: bool, reason: str
) -> ParameterReport:
    path = name.rpartition(".")[0]
    return ParameterReport(
        name=name,
        stages=stages,
        style=layout.placement.styles.get(path, "split" if name in layout.placement.shards else ""),
        difference=found.difference,
        size=float(found.whole.abs().max()) if found.whole.numel() else 0.0,
        relative=found.relative,
        is_same=is_same,
        reason=reason,
    )


def _stages(module: nn.Module, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The stages that own each parameter, under any of its names."""
    owners: dict[nn.Parameter, set[int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, set()).update(layout.partition.owners(name))
    return {name: tuple(sorted(owners[parameter])) for name, parameter in module.named_parameters()}


def _told(split: SplitRun, layout: Layout) -> str:
    """Say what the rank that failed raised, and in which module."""
    error = split.error
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    if split.running:
        style = layout.placement.styles.get(split.running)
        of_style = "" if not layout.placement.styles else f" (style in the plan: {style or 'none'})"
        lines.append(f"raised in {split.running!r}{of_style}")
    return "\n".join(lines)


def _describe(layout: Layout, config: ParallelConfig) -> str:
    return describe(layout, config).removeprefix("PTDPStrategy: ")


def _tolerance(whole: WholeRun) -> float:
    """The relative tolerance for the coarsest dtype among the gradients."""
    return max((_TOLERANCES.get(dtype, _COARSE) for dtype in _dtypes(whole)), default=_TOLERANCES[torch.float64])


def _dtypes(whole: WholeRun) -> set[torch.dtype]:
    return {gradient.dtype for gradient in whole.gradients.values() if gradient is not None}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
