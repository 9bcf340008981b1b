"""Finds out by experiment why a split step differs from the whole one: each axis of the layout is run by itself.

An axis is the cut of the batch (replicas and microbatches), tensor peers, or the pipeline. If an axis alone differs
from one process, what differs there tells more: its gradients, outputs of modules, or another run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_ptdp.check.compare import Comparison, compare
from lightning_ptdp.check.copies import Original
from lightning_ptdp.check.report import patterns
from lightning_ptdp.check.runs import SplitRun, WholeRun, run_split, run_whole
from lightning_ptdp.config import ParallelConfig, micro_batch_size
from lightning_ptdp.host.torch import BatchNorm
from lightning_ptdp.layout import lay_out
from lightning_ptdp.topology import Topology

Reasons = dict[str, str]
"""Why parameters differ, a sentence for each, by name."""


@dataclass(frozen=True)
class Trial:
    """What a check was asked for, and a way to run a variant of it.

    Attributes:
        original: the user's module and batch.
        config: as given. All sizes but that of a microbatch are numbers.
        topology: the sizes t, p and d.
        seed: of the random streams.
        tolerance: relative.
        error: text of what the step raised under the layout with all its axes, "" if it did not fail.
    """

    original: Original
    config: ParallelConfig
    topology: Topology
    seed: int
    tolerance: float
    error: str = ""

    def failure(self, what: str, split: SplitRun) -> str:
        """Say that one axis alone fails, and by which error, unless it is that of all axes together.

        Args:
            what: names the axis.
            split: the run of this axis, which failed.
        """
        if str(split.error) == self.error:
            return f"the same happens with {what} alone"
        return f"with {what} alone the step fails: {split.error}"

    def run(self, config: ParallelConfig, topology: Topology, *, traces_outputs: bool) -> SplitRun:
        """Run the split step under another layout of the same module."""
        layout, _ = lay_out(self.original.make_module(), config, topology)
        return run_split(self.original, config, layout, seed=self.seed, traces_outputs=traces_outputs)

    def differing(self, whole: WholeRun, split: SplitRun) -> dict[str, Comparison]:
        """Compare two runs, and return the parameters whose gradients differ."""
        return {name: c for name, c in compare(whole, split).items() if not c.relative <= self.tolerance}

    def is_same_loss(self, whole: WholeRun, split: SplitRun) -> bool:
        """Whether the losses of two runs are the same, within the tolerance."""
        return abs(split.parts[0].loss - whole.loss) <= self.tolerance * max(abs(whole.loss), 1e-3)


def explain(trial: Trial, whole: WholeRun, differing: Sequence[str]) -> tuple[Reasons, list[str]]:
    """Find out why parameters differ.

    Args:
        trial: what was asked.
        whole: the step in one process.
        differing: names of the parameters whose gradients differ.

    Returns:
        A reason for each of these parameters for which one was found; and reasons that concern the loss, or all.
    """
    random = _random_draws(trial, whole)
    if random:
        return dict.fromkeys(differing, random), [random]
    by_parameter: dict[str, list[str]] = {}
    others: list[str] = []
    for axis in (_cut_batch, _tensor_peers, _pipeline):
        found, more = axis(trial, whole)
        others += more
        for name, reason in found.items():
            by_parameter.setdefault(name, []).append(reason)
    reasons = {name: "; ".join(by_parameter[name]) for name in differing if name in by_parameter}
    if not by_parameter and not others:
        others = ["each axis by itself computes what one process computes, only all of them together do not"]
    return reasons, others


def explain_error(trial: Trial, whole: WholeRun) -> list[str]:
    """Find out which axis of the layout makes the step fail; returns a sentence for each that does so alone."""
    alone = [more for axis in (_cut_batch, _tensor_peers, _pipeline) for more in axis(trial, whole)[1]]
    return alone or ["each axis by itself runs, only all of them together do not"]


def _random_draws(trial: Trial, whole: WholeRun) -> str:
    """Say that the step draws random numbers besides dropout, if its result depends on them; "" if not."""
    if not whole.has_drawn:
        return ""
    again = run_whole(trial.original, seed=trial.seed + 1)
    if again.loss == whole.loss and all(_equal(whole, again, name) for name in whole.gradients):
        return ""
    where = patterns(list(dict.fromkeys(whole.trace.draws))) or "code outside of leaf modules"
    return (
        f"the step draws random numbers ({where}), and two runs in one process with other seeds differ too: losses "
        f"{whole.loss:.6g} and {again.loss:.6g}; a split run draws others, so nothing can be said until they are off"
    )


def _equal(whole: WholeRun, again: WholeRun, name: str) -> bool:
    """Whether a gradient has the same bits in both runs."""
    first, second = whole.gradients[name], again.gradients[name]
    return first is second if first is None or second is None else torch.equal(first, second)


# -- cutting the batch -------------------------------------------------------------------------------------------------


def _cut_batch(trial: Trial, whole: WholeRun) -> tuple[Reasons, list[str]]:
    """Run the step with the batch cut as the layout cuts it, the module whole; returns as `explain`."""
    d = trial.topology.data_parallel_size
    size = _microbatch_size(trial, whole)
    if d == 1 and size >= whole.num_rows:
        return {}, []
    alone = replace(_unsplit(trial.config), micro_batch_size=size, data_parallel_size=d)
    split = trial.run(alone, Topology(1, 1, d), traces_outputs=False)
    if split.error is not None:
        return {}, [trial.failure("a batch cut in one process", split)]
    differing = trial.differing(whole, split)
    if not differing and trial.is_same_loss(whole, split):
        return {}, []
    reason = _why_cutting_differs(trial, whole, split)
    return dict.fromkeys(differing, reason), [reason]


def _microbatch_size(trial: Trial, whole: WholeRun) -> int:
    """Rows of a microbatch under the layout."""
    topology = trial.topology
    rows = -(-whole.num_rows // topology.data_parallel_size)
    return micro_batch_size(trial.config.micro_batch_size, rows, topology.pipeline_parallel_size)


def _why_cutting_differs(trial: Trial, whole: WholeRun, split: SplitRun) -> str:
    """Say what it may be that depends on the cut: a batch norm, a loss that is a sum, or another loss."""
    pieces = split.parts[0].num_microbatches * trial.topology.data_parallel_size
    start = f"cutting the batch into {pieces} microbatches changes the step, in one process too: "
    norms = [name for name, m in trial.original.module.named_modules() if _normalises_over_rows(m)]
    if norms:
        return (
            f"{start}batch norm ({patterns(norms)}) normalises over the rows of a microbatch; use a norm of each "
            "sample, or microbatches as large as the batch (micro_batch_size)"
        )
    ratio = whole.loss / split.parts[0].loss if split.parts[0].loss else math.nan
    if abs(ratio - pieces) <= trial.tolerance * pieces:
        return (
            f"{start}the loss of the whole batch is {pieces} times that of a microbatch, so it is a sum, where the "
            "mean over microbatches is taken; divide it by the number of rows or targets"
        )
    return (
        f"{start}the loss is not the mean, over samples or over the targets of one cross-entropy, that weights are "
        'told from: return {"loss": loss, "weight": number_of_terms_of_its_mean}; or an operation works on several '
        "rows at once (in-batch negatives, statistics over the batch)"
    )


def _normalises_over_rows(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and module.training


# -- tensor peers ------------------------------------------------------------------------------------------------------


def _tensor_peers(trial: Trial, whole: WholeRun) -> tuple[Reasons, list[str]]:
    """Run the step on tensor peers alone, the batch in one piece; returns as `explain`."""
    t = trial.topology.tensor_parallel_size
    if t == 1:
        return {}, []
    alone = replace(
        _unsplit(trial.config),
        tensor_parallel_size=t,
        sequence_parallel=trial.config.sequence_parallel,
        micro_batch_size=whole.num_rows,
    )
    split = trial.run(alone, Topology(t, 1, 1), traces_outputs=True)
    if split.error is not None:
        return {}, [
            f"{trial.failure('tensor peers', split)}; if a size there is not what it should be, a layer before gives "
            "each peer its part of an activation, and the next takes it for the whole: the plan must name both of a "
            "pair (colwise into a split region, rowwise out of it), or join the parts (colwise_gather_output)"
        ]
    differing = trial.differing(whole, split)
    if not differing and trial.is_same_loss(whole, split):
        return {}, []
    values = _where_values_differ(trial, split)
    return {n: _why_peers_differ(trial, split, n, c) or values for n, c in differing.items()}, []


def _why_peers_differ(trial: Trial, split: SplitRun, name: str, found: Comparison) -> str:
    """Tell from the peers' gradients why a parameter that each holds whole differs; "" if they do not tell."""
    if name in split.layout.placement.shards or len(found.copies) == 1:
        return ""
    copies = [copy.expand(found.whole.shape) for copy in found.copies.values()]
    if float((sum(copies[1:], copies[0]) - found.whole).abs().max()) <= trial.tolerance * found.scale:
        return (
            "each tensor peer holds it whole and has a part of its gradient, the sum of which is right: it is used "
            'on the own heads or own part of activations; give it the style "replicated_with_grad_allreduce"'
        )
    if any(not torch.equal(copy, copies[0]) for copy in copies[1:]):
        return (
            "each tensor peer holds it whole, and their gradients differ: it is used where activations are split, or "
            "before a split layer whose input gradient is not summed (a colwise layer missing from the plan)"
        )
    return ""


def _where_values_differ(trial: Trial, split: SplitRun) -> str:
    """Say at which module the forward of tensor peers first computes other values than that of the whole module."""
    reference = run_whole(trial.original, seed=trial.seed, traces_outputs=True).trace.outputs
    outputs = split.traces[0].outputs
    styles, partial, last_right = split.layout.placement.styles, [], ""
    for (name, call), expected in reference.items():
        mine = outputs.get((name, call))
        if mine is None:
            continue
        if mine.shape != expected.shape:
            partial.append(name)
        elif mine.is_near(expected, trial.tolerance):
            last_right, partial = name, []
        else:
            between = f", after {patterns(partial)} worked on split values" if partial else ""
            return (
                f"values first differ in the output of {name!r} (style {styles.get(name, 'none')}){between}"
                f"{f'; that of {last_right!r} is right' if last_right else ''}: the plan splits what an operation "
                "there needs whole (a norm or softmax over a split dim, a reshape by whole sizes), or names a layer "
                "of a pair (colwise into a split region, rowwise out of it) without the other"
            )
    return (
        "all outputs that tensor peers hold whole are right, and gradients are not: a value is used on each peer's own "
        "part without its gradient being summed (a colwise layer missing from the plan, or "
        '"replicated_with_grad_allreduce")'
    )


# -- a pipeline --------------------------------------------------------------------------------------------------------


def _pipeline(trial: Trial, whole: WholeRun) -> tuple[Reasons, list[str]]:
    """Run the step on a pipeline alone, the batch in one piece; returns as `explain`."""
    p = trial.topology.pipeline_parallel_size
    if p == 1:
        return {}, []
    config = trial.config
    alone = replace(
        _unsplit(config),
        pipeline_parallel_size=p,
        virtual_pipeline_size=config.virtual_pipeline_size,
        pipeline_split=config.pipeline_split,
        schedule=config.schedule,
        micro_batch_size=whole.num_rows,
    )

    def run(config: ParallelConfig) -> SplitRun:
        return trial.run(config, Topology(1, p, 1), traces_outputs=False)

    split = run(alone)
    if split.error is not None:
        return {}, [trial.failure("a pipeline", split)]
    differing = trial.differing(whole, split)
    if not differing and trial.is_same_loss(whole, split):
        return {}, []
    if math.isnan(split.parts[0].loss) and not math.isnan(whole.loss):
        reason = _why_hollow_values_are_used(trial, whole, split, alone, run)
        return dict.fromkeys(differing, reason), [reason]
    return {name: _why_stages_differ(whole, split, name) for name in differing}, []


def _why_hollow_values_are_used(
    trial: Trial, whole: WholeRun, split: SplitRun, config: ParallelConfig, run: Callable[[ParallelConfig], SplitRun]
) -> str:
    """Say which module's values a stage used although another stage owns them: the loss was NaN, which stands for them.

    Each module outside the blocks is tried in `shared=`, under which it has its values on every stage.
    """
    cut = split.layout.partition
    start = "a stage used the values of a module that another stage owns (NaN stands for them): "
    for name in (*cut.first, *cut.last):
        others = replace(
            config,
            first=[n for n in config.first if n != name],
            last=[n for n in config.last if n != name],
            shared=[*config.shared, name],
        )
        tried = run(others)
        if tried.error is None and trial.is_same_loss(whole, tried):
            return f"{start}{name!r}; with shared=[{name!r}] the loss is right, which was tried"
    return (
        f"{start}none of {[*cut.first, *cut.last]} alone; either several are (name them in shared=[...]), or a "
        "block's weights, or activations besides those that one block hands to the next"
    )


def _why_stages_differ(whole: WholeRun, split: SplitRun, name: str) -> str:
    """Say why a parameter's gradient may differ in a pipeline: it gets none, or something passes stages by."""
    cut = split.layout.partition
    given = [part for part in split.parts if part.gradients.get(name) is not None]
    if whole.gradients[name] is not None and not given:
        return (
            f"no gradient reaches it on the stages that own it ({_numbers(cut.owners(name))}): it is used on another "
            "stage, or by what does not lead to the loss there; name its module in first=, last= or shared="
        )
    return (
        "a value takes another way than from block to block: an attribute, a hook or a list that later code reads "
        "holds only what its own stage computed"
    )


def _numbers(stages: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(stages)))


def _unsplit(config: ParallelConfig) -> ParallelConfig:
    """The same configuration with all axes of size 1."""
    return replace(
        config,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        virtual_pipeline_size=1,
        schedule="auto",
        sequence_parallel=False,
        pipeline_split=None,
    )
