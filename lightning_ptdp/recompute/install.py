"""Gives the chosen modules a forward that recomputes, and takes it away again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ptdp.host.torch import compiled_call_of, is_compiled, set_compiled_call
from lightning_ptdp.own_class import put_on
from lightning_ptdp.recompute.choice import Choice
from lightning_ptdp.recompute.moments import Beginning, DefaultDtype, Draws, FunctionModes, HostDraws, ModuleState
from lightning_ptdp.recompute.rerun import Group, Rerun
from lightning_ptdp.recompute.scores import Scores

Wrapper = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a forward: (forward, its arguments, its keyword arguments) -> what it returns."""


class Recomputation:
    """What `install` did to a module, and the way back."""

    def __init__(self, undos: Sequence[Callable[[], None]], scores: Sequence[Scores]) -> None:
        """
        Args:
            undos: each takes a wrapper off again, in the order in which they were put on.
            scores: the wrappers of the blocks in which "selective" looks for attention scores.
        """
        self._undos, self._scores = undos, scores

    def remark(self) -> str | None:
        """Say what a user should know after the first batch: that "selective" found nothing to recompute.

        Returns:
            A sentence, once; None if something is recomputed, or if no block has run a forward with a graph yet.
        """
        ran = [each.num_stretches for each in self._scores if each.num_stretches is not None]
        if not ran:
            return None
        self._scores = ()
        if any(ran):
            return None
        return (
            "recompute='selective' has nothing to recompute: no block keeps attention scores "
            "(scaled_dot_product_attention keeps none where it runs fused, and compiled blocks choose by themselves); "
            "recompute_modules=[...] names modules to run again, recompute='full' runs blocks again"
        )

    def undo(self) -> None:
        """Give the modules their own forward back."""
        for undo in reversed(self._undos):
            undo()
        self._undos = ()


def install(
    module: nn.Module, choice: Choice, stages: Sequence[int], device: torch.device, beginnings: Sequence[Beginning]
) -> Recomputation:
    """Let the chosen modules of some stages recompute.

    Args:
        module: the user's, which holds the blocks of these stages.
        choice: what recomputes.
        stages: numbers of the stages of this rank.
        device: where this rank computes.
        beginnings: note what else a forward starts from, besides its inputs, the modules' state, the random generators,
            and PyTorch's default dtype and function modes.

    Returns:
        What undoes it.
    """
    host = HostDraws()
    everywhere: list[Beginning] = [DefaultDtype, FunctionModes, lambda: Draws(device), host.begin, *beginnings]
    undos: list[Callable[[], None]] = []
    scores: list[Scores] = []

    def rerun(child: nn.Module, **in_group: Any) -> Rerun:
        modules = tuple(child.modules())
        return Rerun([*everywhere, lambda: ModuleState(modules)], **in_group)

    for stage in stages:
        names, group = choice.stages[stage], Group()
        for i, name in enumerate(names):
            block = module.get_submodule(name)
            inside = [each for each in choice.modules if each.startswith(f"{name}.")]
            if choice.kind == "full":
                first, last = i % choice.every == 0, (i + 1) % choice.every == 0 or i + 1 == len(names)
                undos.append(_wrap(block, rerun(block, group=group, is_first=first, is_last=last)))
            elif inside:
                undos += [_wrap(child, rerun(child)) for child in map(module.get_submodule, inside)]
            elif not _is_compiled(block):
                scores.append(Scores(device))
                undos.append(_wrap(block, scores[-1]))
            else:
                scores.append(Scores(device, num_stretches=0))
    return Recomputation(undos, scores)


def _is_compiled(block: nn.Module) -> bool:
    """Whether torch.compile runs a part of the block, where no operation can be watched."""
    return any(is_compiled(child) for child in block.modules())


def _wrap(module: nn.Module, wrapper: Wrapper) -> Callable[[], None]:
    """Put a wrapper around a module's forward, inside its hooks; returns a function that takes it off.

    The class is swapped, so that a copy of the module runs a forward of its own. A module that is compiled in place has
    the wrapper around what was compiled, hooks included: within, it would break the graph.
    """
    compiled = compiled_call_of(module)
    if compiled is not None:
        set_compiled_call(module, lambda *args, **kwargs: wrapper(compiled, args, kwargs))

        def restore() -> None:
            set_compiled_call(module, compiled)

        return restore
    base, own = type(module), module.__dict__.pop("forward", None)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(own or partial(base.forward, self), args, kwargs)

    take_off = put_on(module, {"forward": forward})

    def undo() -> None:
        take_off()
        if own is not None:
            module.__dict__["forward"] = own

    return undo
