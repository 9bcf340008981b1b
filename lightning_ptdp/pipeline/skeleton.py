"""The user's module on one rank: the whole tree, a part of it owned, and calls that enter and leave at the cuts.

The user's step runs once a microbatch on every stage. Inside it

    modules before the blocks    run on the first stage; elsewhere their twins answer in shapes
    block below the stage        hands its input on; the one just below returns the activation received
    block of the stage           runs
    block above the stage        leaves the step by `StageExit`
    modules after the blocks     run on the last stage

A block's class is swapped for a subclass with its own `__call__`. Hooks would run again inside a user's activation
checkpoint; a class does not. `isinstance`, attributes and names stay what they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.host.torch import pytree
from lightning_ptdp.own_class import put_on
from lightning_ptdp.pipeline.hollow import HollowParameters, ShapeTwin
from lightning_ptdp.pipeline.partition import Partition
from lightning_ptdp.pipeline.step_run import StepRun

_ATTRIBUTE = "_ptdp_skeleton"
_active = threading.local()


class StageExit(BaseException):
    """Leaves the user's step where the stage ends. Not an `Exception`: a user's handler must not catch it."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What crosses a cut: the tensors of a block's output, and the structure around them."""

    tensors: tuple[Tensor, ...]
    structure: pytree.TreeSpec
    others: tuple[Any, ...]

    @classmethod
    def of(cls, output: Any, where: str) -> Payload:
        """Take a block's output apart.

        Raises:
            TypeError: there is no tensor in it.
        """
        leaves, structure = pytree.tree_flatten(output)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if not tensors:
            raise TypeError(
                f"{where} returned {type(output).__name__}, which holds no tensor; a stage can end only at a block "
                "whose output is a tensor or a structure of tensors"
            )
        return cls(tensors, structure, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    def rebuild(self, tensors: tuple[Tensor, ...]) -> Any:
        """Build the block's output again, around other tensors."""
        following = iter(tensors)
        leaves = [next(following) if leaf is _TENSOR else leaf for leaf in self.others]
        return pytree.tree_unflatten(leaves, self.structure)


class _TensorMark:
    """Stands for a tensor in a payload's leaves; one object, also after pickling."""

    def __reduce__(self) -> str:
        return "_TENSOR"


_TENSOR = _TensorMark()


class Pass:
    """One run of the user's step for one stage and microbatch."""

    def __init__(self, skeleton: Skeleton, stage: int, received: Payload | None, run: StepRun) -> None:
        bounds = skeleton.partition.bounds
        self.skeleton, self.stage, self.run = skeleton, stage, run
        self.low, self.high, self.end = bounds[stage], bounds[stage + 1], bounds[-1]
        self.is_first, self.is_last = self.low == 0, self.high == self.end
        self.received = received
        self.sent: Payload | None = None
        self.next_block = 0
        self.needs_graph = torch.is_grad_enabled()

    def __enter__(self) -> Pass:
        assert _current() is None, "passes do not nest"
        _active.value = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.value = None

    def run_block(self, index: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer the call of block `index` in the way that its place relative to the stage asks."""
        self._check_order(index)
        self._check_graph(index)
        self.next_block += 1
        if index >= self.high:
            raise StageExit
        if index < self.low:
            return self._hand_on(index, args, kwargs)
        if index == self.low:
            self.run.enter_stage(self.stage)
        output = call(*args, **kwargs)
        if index == self.end - 1:
            self.run.after_blocks()
        elif index == self.high - 1:
            self.sent = Payload.of(output, f"block {index} of {self.skeleton.partition.blocks!r}")
        return output

    def _hand_on(self, index: int, args: Any, kwargs: Any) -> Any:
        assert self.received is not None, "a stage above the first has received an activation"
        if index == self.low - 1:
            return self.received.rebuild(self.received.tensors)
        hidden = _first_tensor(args, kwargs)
        stand_ins = tuple(
            hidden if i == 0 else torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 0)
            for i, tensor in enumerate(self.received.tensors)
        )
        return self.received.rebuild(stand_ins)

    def _check_order(self, index: int) -> None:
        if index == self.next_block:
            return
        blocks = self.skeleton.partition.blocks
        if index == 0:
            raise RuntimeError(
                f"block 0 of {blocks!r} ran again after block {self.next_block - 1}: the step calls the model a second "
                "time, and a pipeline allows one call a step; use pipeline_parallel_size=1, or one call on a joined "
                "batch"
            )
        raise RuntimeError(
            f"block {index} of {blocks!r} ran where block {self.next_block} was due: a pipeline needs blocks that run "
            "once each and in order (no loops, skips or layer drop); use pipeline_parallel_size=1"
        )

    def _check_graph(self, index: int) -> None:
        if torch.is_grad_enabled() or not self.needs_graph:
            return
        raise RuntimeError(
            f"block {index} of {self.skeleton.partition.blocks!r} ran without a graph inside a step that has one, so "
            "no gradient would cross the stages: around a block use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False), and no torch.no_grad(); inside a block both are fine; or use "
            "pipeline_parallel_size=1"
        )


def _current() -> Pass | None:
    found: Pass | None = getattr(_active, "value", None)
    return found


def _first_tensor(args: Any, kwargs: Any) -> Tensor:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            return leaf
    raise TypeError("a block was called without any tensor; a pipeline needs blocks that take the activation")


class Skeleton:
    """A module split over pipeline stages, as one rank sees it.

    Making one changes the module: blocks and outer modules get classes of their own, and what the rank does not own is
    hollow from then on.
    """

    def __init__(self, module: nn.Module, partition: Partition, stages: tuple[int, ...], device: torch.device) -> None:
        """Split a module.

        Args:
            module: whole.
            partition: which stage owns what.
            stages: the stages of this rank, ascending.
            device: where the rank computes.
        """
        self.partition = partition
        self.stages = stages
        self.parameter_names = tuple(name for name, _ in module.named_parameters())
        self.state_names = tuple(module.state_dict())
        self.aliases = aliases_of(module)
        everything = dict(module.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in everything.items()}
        self.dtypes = {name: parameter.dtype for name, parameter in everything.items()}
        self._guard_outside(module)
        self._install_blocks(module)
        self._hollow = HollowParameters(module, self._foreign_names(module), device)
        module.__dict__[_ATTRIBUTE] = self

    @staticmethod
    def of(module: nn.Module) -> Skeleton | None:
        """Look up the skeleton of a module that was split before; None if it was not."""
        found: Skeleton | None = module.__dict__.get(_ATTRIBUTE)
        return found

    def __deepcopy__(self, _: Any) -> Skeleton:
        """A copy of a split module is split in the same way; what is hollow stays the original's."""
        return self

    @property
    def hollow(self) -> frozenset[nn.Parameter]:
        """What stands for the parameters that other ranks own."""
        return self._hollow.parameters

    def owners(self, name: str) -> frozenset[int]:
        """The stages that own a parameter, under any of its names."""
        return frozenset().union(*(self.partition.owners(alias) for alias in self.aliases.get(name, (name,))))

    def owns(self, name: str) -> bool:
        """Whether a stage of this rank owns the parameter."""
        return not self.owners(name).isdisjoint(self.stages)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let `module.parameters()` list the whole model, hollow parameters included, within the context."""
        self._hollow.register()
        try:
            yield
        finally:
            self._hollow.unregister()

    def forward(
        self, stage: int, microbatch: int, received: Payload | None, run: StepRun
    ) -> tuple[Payload | None, Any]:
        """Run the user's step on a microbatch as `stage`.

        Args:
            stage: its number.
            microbatch: its number.
            received: what the stage below sent; None on the first.
            run: calls the step.

        Returns:
            The payload for the next stage and None, or, on the last stage, None and what the step returned.

        Raises:
            RuntimeError: the step did not call the model's blocks once each and in order.
        """
        through = Pass(self, stage, received, run)
        result = None
        with through:
            try:
                result = run.call(stage, microbatch, is_whole=False)
                returned = True
            except StageExit:
                returned = False
        if returned and not (through.is_last and through.next_block == through.end):
            raise RuntimeError(
                f"the step returned after {through.next_block} of the {through.end} blocks of "
                f"{self.partition.blocks!r}: a pipeline needs a step that calls the model once (and lets BaseException "
                "through)"
            )
        return through.sent, result

    def _foreign_names(self, module: nn.Module) -> list[str]:
        """List parameters that other ranks own, and the buffers of their blocks."""
        names = [name for name, _ in module.named_parameters(remove_duplicate=False) if not self.owns(name)]
        prefix = f"{self.partition.blocks}."
        for name, _ in module.named_buffers(remove_duplicate=False):
            if name.startswith(prefix) and self.partition.owners(name).isdisjoint(self.stages):
                names.append(name)
        return names

    def _install_blocks(self, module: nn.Module) -> None:
        blocks = module.get_submodule(self.partition.blocks)
        for index, block in enumerate(blocks.children()):
            _swap_class(block, _block_call)
            block.__dict__["_ptdp_index"] = index
            block.__dict__["_ptdp_owned"] = self.partition.stage_of_block(index) in self.stages

    def _guard_outside(self, module: nn.Module) -> None:
        for name in (*self.partition.first, *self.partition.last):
            if name in self.shapes:
                continue  # a bare parameter, not a module
            outer = module.get_submodule(name)
            outer.__dict__["_ptdp_name"] = name
            outer.__dict__["_ptdp_owned"] = (0 if name in self.partition.first else self.partition.num_stages - 1) in (
                self.stages
            )
            if name in self.partition.first:
                outer.__dict__["_ptdp_twin"] = ShapeTwin(outer)
                _swap_class(outer, _first_call)
            else:
                _swap_class(outer, _last_call)


def aliases_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """List for each parameter name all names of the same parameter: several if weights are tied."""
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return {name: tuple(names) for names in by_parameter.values() for name in names}


def _swap_class(module: nn.Module, call: Callable[..., Any]) -> None:
    """Give a module a class of its own; `call` is handed the module and its former `__call__`."""
    base = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return call(self, partial(base.__call__, self), args, kwargs)

    put_on(module, {"__call__": __call__})


def _outside_a_run(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} is split over pipeline stages, and this rank holds only its own; it runs inside the steps of "
        "Trainer.fit, validate, test and predict alone; to use the model elsewhere load a checkpoint into a new module"
    )


def _block_call(self: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    run = _current()
    if run is not None:
        return run.run_block(self._ptdp_index, call, args, kwargs)  # type: ignore[arg-type]
    if self._ptdp_owned:
        return call(*args, **kwargs)  # recomputed by a user's checkpoint, in the backward
    raise _outside_a_run(f"block {self._ptdp_index}")


def _first_call(self: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    run = _current()
    if run is None:
        if self._ptdp_owned:
            return call(*args, **kwargs)
        raise _outside_a_run(repr(self._ptdp_name))
    if run.is_first:
        return call(*args, **kwargs)
    if run.next_block == run.end:
        raise RuntimeError(
            f"{self._ptdp_name!r} ran after the last block, on a stage that does not own it: either the step calls the "
            "model a second time (a pipeline allows one call), or the module runs after the blocks: name it in "
            "last=[...], or in shared=[...] if it runs before them too"
        )
    try:
        return self._ptdp_twin(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        error.add_note(
            f"raised while {self._ptdp_name!r}, which another stage owns, was asked for the shape of its output; name "
            "it in shared=[...] to keep it on every stage"
        )
        raise


def _last_call(self: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    run = _current()
    if run is None:
        if self._ptdp_owned:
            return call(*args, **kwargs)
        raise _outside_a_run(repr(self._ptdp_name))
    if run.is_last and run.next_block == run.end:
        return call(*args, **kwargs)
    raise RuntimeError(
        f"{self._ptdp_name!r} ran before the last block, where only its own stage could run it: name it in first=[...] "
        "if it runs before the blocks, or in shared=[...] if several stages use it"
    )
