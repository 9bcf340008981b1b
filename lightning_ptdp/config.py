"""What a user asks of the strategy: one frozen value that checks itself.

``ParallelConfig`` holds the request (sizes may be "auto"); ``resolve`` turns it into a :class:`Topology` for a number
of processes. Faults are collected, never raised one by one: a user sees every wrong setting at once.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal

from lightning_ptdp.topology import Topology

Auto = Literal["auto"]

RECOMPUTE = ("none", "full", "selective")
_LISTS = ("first", "last", "shared")
_FLAGS = (
    "sequence_parallel",
    "scatter_gather",
    "distributed_optimizer",
    "save_distributed_checkpoint",
    "async_checkpoint",
    "detect_nonfinite",
)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [i for i in range(1, number + 1) if number % i == 0]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Every setting of `PTDPStrategy`, whose docstring tells what each means, but those of all Lightning strategies.

    Sizes may be "auto": `resolve` fills them in for a number of processes. Nothing is checked on construction; `faults`
    lists what is wrong.
    """

    tensor_parallel_size: int | Auto = "auto"
    pipeline_parallel_size: int | Auto = "auto"
    data_parallel_size: int | Auto = "auto"
    virtual_pipeline_size: int = 1
    micro_batch_size: int | Auto = "auto"
    eval_micro_batch_size: int | None = None
    schedule: str = "auto"
    recompute: str = "none"
    recompute_every: int = 1
    recompute_layers: int | Sequence[int] | None = None
    recompute_modules: Sequence[str] = ()
    sequence_parallel: bool = False
    scatter_gather: bool = True
    distributed_optimizer: bool = False
    tensor_parallel_plan: Mapping[str, str] | None = None
    pipeline_blocks: str | None = None
    pipeline_split: Sequence[int] | None = None
    first: Sequence[str] = ()
    last: Sequence[str] = ()
    shared: Sequence[str] = ()
    init: str = "plain"
    save_distributed_checkpoint: bool = True
    async_checkpoint: bool = False
    detect_nonfinite: bool = False
    save_on_signal: bool | Sequence[int] = False
    process_group_backend: str | None = None
    timeout: timedelta = timedelta(minutes=30)

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> ParallelConfig:
        """The configuration that is among other named values, which are passed over."""
        return cls(**{setting.name: values[setting.name] for setting in fields(cls)})

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals on which all ranks save; `save_on_signal=True` is SIGTERM alone."""
        if isinstance(self.save_on_signal, bool):
            return (signal.SIGTERM,) if self.save_on_signal else ()
        return tuple(self.save_on_signal) if isinstance(self.save_on_signal, list | tuple) else ()

    def faults(self, schedules: Sequence[str]) -> list[str]:
        """Every setting that is wrong whatever the number of processes, a sentence each."""
        found = []
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "micro_batch_size"):
            found += _count_fault(name, getattr(self, name), allowed="auto")
        found += _count_fault("virtual_pipeline_size", self.virtual_pipeline_size)
        found += _count_fault("eval_micro_batch_size", self.eval_micro_batch_size, allowed=None)
        found += _choice_fault("schedule", self.schedule, ("auto", *schedules))
        found += _choice_fault("init", self.init, ("plain", "by_operation"))
        for name in _FLAGS:
            found += _flag_fault(name, getattr(self, name))
        found += self._signal_faults()
        found += self.split_faults()
        found += self.recompute_faults()
        found += self.module_faults()
        if found:
            return found
        if self.virtual_pipeline_size > 1 and self.pipeline_parallel_size == 1:
            found.append(
                f"virtual_pipeline_size={self.virtual_pipeline_size} interleaves the stages of a pipeline, and "
                "pipeline_parallel_size=1 has none; use virtual_pipeline_size=1, or pipeline_parallel_size > 1"
            )
        if self.virtual_pipeline_size > 1 and self.schedule == "1f1b":
            found.append(
                f"schedule='1f1b' runs one chunk a rank, got virtual_pipeline_size={self.virtual_pipeline_size}; "
                "use schedule='interleaved' (or 'auto')"
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            found.append(
                "sequence_parallel=True splits the sequence over the tensor-parallel ranks, and tensor_parallel_size=1 "
                "has one; leave it off"
            )
        return found

    def module_faults(self) -> list[str]:
        """What is wrong with the names of modules and with the plan by themselves, a sentence each."""
        found = []
        if self.tensor_parallel_plan is not None and not _is_plan(self.tensor_parallel_plan):
            found.append(
                "tensor_parallel_plan must be a dict of name patterns to styles, such as "
                f'{{"layers.*.up": "colwise"}}; got {self.tensor_parallel_plan!r}'
            )
        blocks: object = self.pipeline_blocks
        if not isinstance(blocks, str | None):
            found.append(f"pipeline_blocks must be the name of a list of modules, a str; got {blocks!r}")
        named = {argument: getattr(self, argument) for argument in _LISTS}
        for argument, names in named.items():
            if not _are_names(names):
                found.append(f"{argument} must be a list of names of modules; got {names!r}; use {argument}=['...']")
        counts = Counter(name for names in named.values() if _are_names(names) for name in dict.fromkeys(names))
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            found.append(f"first, last and shared each name a module once; {twice} are in two; keep one of them")
        return found

    def without_module_faults(self) -> ParallelConfig:
        """The same, with None or nothing where a name of a module or the plan is of the wrong kind."""
        return replace(
            self,
            tensor_parallel_plan=self.tensor_parallel_plan if _is_plan(self.tensor_parallel_plan) else None,
            pipeline_blocks=self.pipeline_blocks if isinstance(self.pipeline_blocks, str) else None,
            first=self.first if _are_names(self.first) else (),
            last=self.last if _are_names(self.last) else (),
            shared=self.shared if _are_names(self.shared) else (),
        )

    def _signal_faults(self) -> list[str]:
        """Signals that no process can take."""
        if not isinstance(self.save_on_signal, bool | list | tuple):
            return [f"save_on_signal must be True, False or a list of signals; got {self.save_on_signal!r}"]
        possible = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        strange = [number for number in self.signals if number not in possible]
        return [f"save_on_signal must name signals that a process can handle, got {strange}"] if strange else []

    def split_faults(self) -> list[str]:
        """What is wrong with `pipeline_split` by itself, a sentence each."""
        if self.pipeline_split is None:
            return []
        if not isinstance(self.pipeline_split, list | tuple):
            return [f"pipeline_split must be a list of the blocks of each stage, or None; got {self.pipeline_split!r}"]
        split = list(self.pipeline_split)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in split):
            return [f"pipeline_split gives the blocks of each stage, all at least 1; got {split}"]
        if isinstance(self.pipeline_parallel_size, int) and isinstance(self.virtual_pipeline_size, int):
            stages = self.pipeline_parallel_size * self.virtual_pipeline_size
            if len(split) != stages:
                return [
                    f"pipeline_split needs a number for each of the p * v = {self.pipeline_parallel_size} * "
                    f"{self.virtual_pipeline_size} = {stages} stages; got {len(split)}: {split}"
                ]
        return []

    def recompute_faults(self) -> list[str]:
        """What is wrong with the settings of recomputation by themselves, a sentence each."""
        found = _choice_fault("recompute", self.recompute, RECOMPUTE)
        found += _count_fault("recompute_every", self.recompute_every)
        if not _are_block_counts(self.recompute_layers):
            found.append(
                "recompute_layers must be the blocks that each stage recomputes, one whole number of at least 0 or a "
                f"list of p * v, or None for all; got {self.recompute_layers!r}"
            )
        names: object = self.recompute_modules
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            found.append(
                f"recompute_modules must be a list of name patterns of modules; got {names!r}; use ['blocks.*.attend']"
            )
        return found or self._recompute_conflicts()

    def _recompute_conflicts(self) -> list[str]:
        found = []
        layers = self.recompute_layers
        sizes = self.pipeline_parallel_size, self.virtual_pipeline_size
        if isinstance(layers, Sequence) and all(isinstance(size, int) for size in sizes):
            stages = self.pipeline_parallel_size * self.virtual_pipeline_size
            if len(layers) != stages:
                found.append(
                    f"recompute_layers needs a number for each of the p * v = {self.pipeline_parallel_size} * "
                    f"{self.virtual_pipeline_size} = {stages} stages; got {len(layers)}: {list(layers)}"
                )
        if self.recompute == "none" and layers is not None:
            found.append(
                f"recompute_layers={layers!r} says where to recompute, and recompute='none'; use recompute='full' or "
                "'selective', or leave it out"
            )
        if self.recompute != "full" and self.recompute_every != 1:
            found.append(
                f"recompute_every={self.recompute_every} groups blocks that are recomputed whole, and "
                f"recompute={self.recompute!r}; use recompute='full', or leave it out"
            )
        if self.recompute != "selective" and self.recompute_modules:
            found.append(
                f"recompute_modules={list(self.recompute_modules)} are what 'selective' recomputes, and "
                f"recompute={self.recompute!r}; use recompute='selective', or leave them out"
            )
        return found

    def resolve(self, world_size: int, model_parallel: tuple[int, int] = (1, 1)) -> tuple[Topology, list[str]]:
        """Fill in the automatic sizes for `world_size` processes.

        model_parallel: the (t, p) to take where the user left "auto".

        Returns the topology and the faults found; with faults the topology is the nearest that can be talked about.
        """
        t = _size(self.tensor_parallel_size, model_parallel[0])
        p = _size(self.pipeline_parallel_size, model_parallel[1])
        given = f"tensor_parallel_size={t} * pipeline_parallel_size={p}"
        if self.data_parallel_size == "auto":
            if world_size % (t * p):
                return Topology(t, p, 1), [
                    f"the number of processes must be a multiple of t * p: got {world_size} processes for {given} = "
                    f"{t * p}; use devices * num_nodes = {_multiples(t * p, world_size)}, or sizes whose product "
                    f"divides {world_size} ({divisors(world_size)})"
                ]
            return Topology(t, p, world_size // (t * p)), []
        d = _size(self.data_parallel_size, 1)
        if t * p * d != world_size:
            return Topology(t, p, d), [
                f"the number of processes must be t * p * d: got {world_size} processes for {given} * "
                f"data_parallel_size={d} = {t * p * d}; use devices * num_nodes = {t * p * d}, or "
                "data_parallel_size='auto'"
            ]
        return Topology(t, p, d), []


def micro_batch_size(requested: int | Auto, batch_size: int, pipeline_parallel_size: int) -> int:
    """Samples a microbatch for a replica's batch of `batch_size` samples.

    "auto" is the largest size that gives at least 4 microbatches a pipeline rank, at least 1; without a pipeline there
    is no bubble to fill, and the batch stays whole.
    """
    if requested != "auto":
        return min(requested, batch_size)
    if pipeline_parallel_size == 1:
        return batch_size
    return max(1, batch_size // (4 * pipeline_parallel_size))


def recompute_every(num_layers: int, input_bytes: float, intermediate_bytes: float) -> int:
    """The `recompute_every` that needs least memory for the activations of one microbatch on a stage.

    With k blocks a group a stage keeps ceil(l / k) * A_input, and while one group is run again k * A_intermediate. The
    least is near k = sqrt(l * A_input / A_intermediate), which is c = l / k = sqrt(l * A_intermediate / A_input)
    checkpoints (SC'21 section 3.5). Several microbatches in flight multiply A_input.

    num_layers: blocks of the stage (l). input_bytes: of a block's input (A_input). intermediate_bytes: what a block
    saves for backward (A_intermediate).
    """

    def needed(k: int) -> float:
        return math.ceil(num_layers / k) * input_bytes + k * intermediate_bytes

    return min(range(1, num_layers + 1), key=needed)


def _size(requested: int | Auto, automatic: int) -> int:
    """A size to go on with: one that is no size at all is a fault of its own."""
    if requested == "auto":
        return automatic
    return requested if isinstance(requested, int) and requested >= 1 else 1


def _count_fault(name: str, value: object, allowed: object = 1) -> list[str]:
    if value == allowed or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return []
    also = "" if allowed == 1 else f" or {allowed!r}"
    return [f"{name} must be a whole number of at least 1{also}; got {value!r}"]


def _are_block_counts(value: object) -> bool:
    """Whether a value is None, a number of blocks, or a list of such numbers."""
    counts = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts)


def _choice_fault(name: str, value: object, choices: Sequence[str]) -> list[str]:
    return [] if value in choices else [f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}"]


def _flag_fault(name: str, value: object) -> list[str]:
    return [] if isinstance(value, bool) else [f"{name} must be True or False; got {value!r}"]


def _is_plan(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(part, str) for pair in value.items() for part in pair)


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _multiples(step: int, near: int) -> str:
    below = near // step * step
    return f"{below} or {below + step}" if below else f"{step}"
