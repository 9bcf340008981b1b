"""Works out how a module will lie on the ranks: sizes, stages and shards, before anything is changed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ptdp.config import ParallelConfig, divisors
from lightning_ptdp.pipeline.blocks import find_blocks
from lightning_ptdp.pipeline.partition import ONE_STAGE, Partition, partition
from lightning_ptdp.recompute import Choice
from lightning_ptdp.recompute import choose as choose_recomputed
from lightning_ptdp.schedule import choose
from lightning_ptdp.tensor_parallel.heads import check_heads
from lightning_ptdp.tensor_parallel.placement import Placement, place, with_sequence
from lightning_ptdp.tensor_parallel.plan import check_plan, find_plan, suggestion
from lightning_ptdp.topology import Topology

STATE_BYTES = 16  # bytes of a parameter of AdamW in float32: weight, gradient, two moments; docs/strategy.md says so
STATE_FRACTION = 0.6  # the part of a device's memory that weights and states may take; the rest is for activations

_ATTRIBUTE = "_ptdp_layout"


@dataclass(frozen=True)
class Layout:
    """How a module lies on the ranks.

    Attributes:
        topology: the sizes t, p and d.
        num_stages: p * v, also if the module could not be cut into so many (a fault) and `partition` has one stage.
        partition: which stage owns what.
        placement: how tensor peers split each layer.
        recompute: what recomputes; None if nothing does.
    """

    topology: Topology
    num_stages: int
    partition: Partition = ONE_STAGE
    placement: Placement = field(default_factory=Placement)
    recompute: Choice | None = None


def layout_of(module: nn.Module) -> Layout | None:
    """Look up the layout that an earlier run has split a module for; None if it is whole."""
    found: Layout | None = module.__dict__.get(_ATTRIBUTE)
    return found


def remember(module: nn.Module, layout: Layout) -> None:
    """Note on a module the layout that it is about to be split for."""
    module.__dict__[_ATTRIBUTE] = layout


def describe(layout: Layout, config: ParallelConfig) -> str:
    """Describe a layout in a line, for the start of a run."""
    topology, cut = layout.topology, layout.partition
    sizes = (
        f"PTDPStrategy: tensor {topology.tensor_parallel_size} x pipeline {topology.pipeline_parallel_size} x data "
        f"{topology.data_parallel_size}"
    )
    if layout.recompute is not None:
        sizes += f"; recompute {layout.recompute.kind!r} in {layout.recompute.num_blocks} blocks"
    if cut.num_stages == 1:
        return sizes
    blocks = ", ".join(str(high - low) for low, high in pairwise(cut.bounds))
    schedule = choose(
        config.schedule,
        pipeline_parallel_size=topology.pipeline_parallel_size,
        virtual_pipeline_size=config.virtual_pipeline_size,
    )
    return f"{sizes}; blocks of {cut.blocks!r} in each stage: {blocks}; schedule {schedule}"


def lay_out(module: nn.Module, config: ParallelConfig, topology: Topology) -> tuple[Layout, list[str]]:
    """Work out the layout of a module.

    A module that an earlier run has split keeps its layout, and asking for another is a fault.

    Args:
        module: the user's, on every rank.
        config: what the user asks for.
        topology: the sizes.

    Returns:
        The layout, and a sentence for each fault. With faults, the layout is what can be said all the same.
    """
    chunks = config.virtual_pipeline_size if isinstance(config.virtual_pipeline_size, int) else 1
    stages = topology.pipeline_parallel_size * max(1, chunks)
    known = layout_of(module)
    if known is not None:
        same = (
            known.topology.tensor_parallel_size == topology.tensor_parallel_size
            and known.topology.pipeline_parallel_size == topology.pipeline_parallel_size
            and known.num_stages == stages
        )
        faults = [] if same else [_was_split(known, topology, stages)]
        recompute, more = _recomputation(module, config, known.partition) if same else (None, [])
        return Layout(topology, stages, known.partition, known.placement, recompute), faults + more
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        return Layout(topology, stages), [
            f"parameters {lazy[:4]} ({len(lazy)} in all) have no shape yet, and so no place; give the "
            "layers their input sizes, or run the module once on a sample in __init__ or configure_model"
        ]
    config = config.without_module_faults()
    cut, faults = _partition(module, config, stages)
    is_cut = not faults
    if is_cut and stages > 1:
        faults += _side_outputs(module)
    placement, more = _placement(module, topology.tensor_parallel_size, config)
    recompute, worse = _recomputation(module, config, cut) if is_cut else (None, [])
    return Layout(topology, stages, cut, placement, recompute), faults + more + worse


def _recomputation(module: nn.Module, config: ParallelConfig, cut: Partition) -> tuple[Choice | None, list[str]]:
    """Choose what recomputes; returns faults, except those of the configuration itself, which are told elsewhere."""
    if config.recompute == "none" or config.recompute_faults():
        return None, []
    try:
        stages = _blocks_of_stages(module, config, cut)
        found = choose_recomputed(
            module,
            stages,
            kind=config.recompute,
            every=config.recompute_every,
            layers=config.recompute_layers,
            patterns=config.recompute_modules,
        )
    except ValueError as error:
        return None, [str(error)]
    return found, []


def _blocks_of_stages(module: nn.Module, config: ParallelConfig, cut: Partition) -> list[list[str]]:
    """List the full names of the blocks of each stage.

    Raises:
        ValueError: the module has no list of blocks.
    """
    if cut.num_stages > 1:
        names = [f"{cut.blocks}.{name}" for name in cut.block_names]
        return [names[low:high] for low, high in pairwise(cut.bounds)]
    try:
        path = find_blocks(module, config.pipeline_blocks)
    except ValueError as error:
        raise ValueError(
            f"recompute={config.recompute!r} runs a list of blocks again, and none was found; put the layers into an "
            f"nn.ModuleList, name it by pipeline_blocks=, or use recompute='none' ({error})"
        ) from None
    return [[f"{path}.{name}" for name, _ in module.get_submodule(path).named_children()]]


def _was_split(known: Layout, topology: Topology, stages: int) -> str:
    """Say that a module is split already, for other sizes than a run asks for."""
    return (
        f"the module was split for tensor_parallel_size={known.topology.tensor_parallel_size} and {known.num_stages} "
        f"stages by an earlier run, and each rank holds only its part; this run asks for "
        f"tensor_parallel_size={topology.tensor_parallel_size} and {stages} stages: build a new module for it, and "
        "load a checkpoint"
    )


def _partition(module: nn.Module, config: ParallelConfig, stages: int) -> tuple[Partition, list[str]]:
    """Cut a module into stages; returns one stage if that is what is asked for, or with faults."""
    if stages == 1:
        return ONE_STAGE, []
    try:
        found = partition(
            module,
            stages,
            blocks=config.pipeline_blocks,
            split=None if config.split_faults() else config.pipeline_split,
            first=config.first,
            last=config.last,
            shared=config.shared,
        )
    except ValueError as error:
        return ONE_STAGE, [str(error)]
    return found, []


def _side_outputs(module: nn.Module) -> list[str]:
    """Refuse outputs that a model collects from every block beside the activation: a stage has only its blocks' own."""
    return [
        f"{path or 'the module'} collects the router logits of all its layers (config.output_router_logits), and a "
        "stage has only its own; set config.output_router_logits = False, or use pipeline_parallel_size=1"
        for path, child in module.named_modules()
        if getattr(getattr(child, "config", None), "output_router_logits", False)
    ][:1]


def _placement(module: nn.Module, size: int, config: ParallelConfig) -> tuple[Placement, list[str]]:
    """Split the layers over `size` tensor peers, by the plan that the user gave or the module carries."""
    if size == 1:
        return Placement(), []
    given = config.tensor_parallel_plan
    plan = dict(given) if given is not None else find_plan(module)
    if not plan:
        return Placement(), [
            f"tensor_parallel_size={size} needs a plan that says how to split the layers, and the module "
            f"({_kinds(module)}) carries none. A first draft, by names alone:\n{suggestion(module)}\n"
            "correct it (colwise into a split region, rowwise out of it), and pass it as tensor_parallel_plan= to the "
            "strategy; or use tensor_parallel_size=1"
        ]
    faults = check_plan(module, plan, is_given=given is not None)
    if faults:
        return Placement(), faults
    placement, faults = place(module, plan, size)
    faults += check_heads(module, placement, size)
    if config.sequence_parallel and not faults:
        try:
            placement = with_sequence(module, placement, find_blocks(module, config.pipeline_blocks))
        except ValueError as error:
            faults.append(str(error))
    return placement, faults


def _kinds(module: nn.Module) -> str:
    return ", ".join(dict.fromkeys(type(child).__name__ for child in (module, *module.children())))


def choose_model_parallel(
    module: nn.Module,
    config: ParallelConfig,
    *,
    world_size: int,
    devices_per_node: int,
    device_bytes: int,
) -> tuple[int, int]:
    """Choose (t, p) for sizes left to "auto": the smallest t * p whose weights and states leave room for activations.

    t grows first, up to the devices of a node, as far as the module's plan and heads allow it; then p (the takeaways of
    SC'21 section 3). If nothing fits, it is the largest t * p that divides the number of processes.

    Args:
        module: whole.
        config: what the user asks for; sizes that are numbers stay.
        world_size: number of processes.
        devices_per_node: an upper bound of t.
        device_bytes: memory of each device.

    Returns:
        (t, p).
    """
    if any(map(is_lazy, module.parameters())):
        return (1, 1)  # which `lay_out` refuses
    parameters = sum(parameter.numel() for parameter in module.parameters())
    tensor = (
        [config.tensor_parallel_size]
        if config.tensor_parallel_size != "auto"
        else [t for t in divisors(devices_per_node) if t == 1 or not _placement(module, t, config)[1]]
    )
    pipeline = (
        [config.pipeline_parallel_size]
        if config.pipeline_parallel_size != "auto"
        else [
            p for p in divisors(world_size) if p == 1 or p * config.virtual_pipeline_size <= _num_blocks(module, config)
        ]
    )
    pairs = [(t, p) for t in tensor for p in pipeline if world_size % (t * p) == 0]
    if not pairs:
        return tensor[0], pipeline[0]
    room = device_bytes * STATE_FRACTION
    fitting = [pair for pair in pairs if parameters * STATE_BYTES / (pair[0] * pair[1]) <= room]
    if fitting:
        return min(fitting, key=lambda pair: (pair[0] * pair[1], -pair[0]))
    return max(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]))


def _num_blocks(module: nn.Module, config: ParallelConfig) -> int:
    """Count the blocks of a module; 1 if none are found."""
    try:
        return sum(1 for _ in module.get_submodule(find_blocks(module, config.pipeline_blocks)).children())
    except ValueError:
        return 1


def memory_of(device: torch.device, processes_per_node: int) -> int:
    """Bytes of memory that a rank may count on: its GPU's, or an equal part of the host's for each process there."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes_per_node
