"""Optimizers' parameter groups: those of the whole model, of which a rank's optimizers hold what it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

Groups = list[list[nn.Parameter]]
OtherParameter = Callable[[nn.Parameter], nn.Parameter]


def _itself(parameter: nn.Parameter) -> nn.Parameter:
    return parameter


class WholeGroups:
    """The groups of a run's optimizers as they are in one process, hollow parameters included."""

    def __init__(self, hollow: frozenset[nn.Parameter] = frozenset()) -> None:
        """hollow: parameters that other ranks own."""
        self._hollow = hollow
        self.weight_of: OtherParameter = _itself
        """What an optimizer steps for a parameter of the module."""
        self.parameter_of: OtherParameter = _itself
        """The parameter of the module behind one that an optimizer steps."""
        self._members: list[Groups] = []

    def names(self, name_of: dict[nn.Parameter, str]) -> list[list[list[str]]]:
        """Names of the whole model's parameters, by optimizer and group."""
        return [[[name_of[p] for p in group] for group in groups] for groups in self._members]

    def hide(self, optimizers: Sequence[Optimizer]) -> None:
        """Take note of the optimizers' whole groups, then leave them what this rank owns; a group may become empty."""
        self._members = [
            [[self.parameter_of(p) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        for optimizer, groups in zip(optimizers, self._members, strict=True):
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [self.weight_of(p) for p in members if p not in self._hollow]
            for parameter in self._hollow & optimizer.state.keys():
                del optimizer.state[parameter]

    @contextmanager
    def shown(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Within, the optimizers list whole groups of the module's parameters, which may be changed."""
        for optimizer, groups in zip(optimizers, self._members, strict=True):
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = members
        try:
            yield
        finally:
            self.hide(optimizers)

    def follow(self, optimizers: Sequence[Optimizer]) -> str | None:
        """Take over changes made while the groups were not shown, if this rank sees all of them; else what is wrong."""
        found = [[[id(p) for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]
        mine = [
            [[id(self.weight_of(p)) for p in group if p not in self._hollow] for group in groups]
            for groups in self._members
        ]
        if found == mine:
            return None
        if self._hollow:
            return (
                "an optimizer's parameter groups were changed where a rank sees only what it owns, so that ranks would "
                "hold different groups; change them in a BaseFinetuning callback, or within "
                "`with trainer.strategy.whole_model():`, on every rank"
            )
        self.hide(optimizers)
        return None
