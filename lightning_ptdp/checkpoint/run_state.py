"""The state of a run on one rank, as a checkpoint has it: the module's, and each optimizer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ptdp.checkpoint.contents import gather_module
from lightning_ptdp.checkpoint.local_state import GroupNames, LocalState, check_names
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.engine.gradients import Gradients
from lightning_ptdp.engine.parameters import Parameters


class RunState:
    """Reads and writes the state of one module and its optimizers. Main weights stand in place of 16-bit ones."""

    def __init__(self, module: nn.Module, parameters: Parameters, gradients: Gradients, groups: Groups) -> None:
        self._module, self._parameters, self._gradients, self._groups = module, parameters, gradients, groups

    def local(self) -> LocalState:
        """Names and locations of what this rank holds."""
        return LocalState(self._groups, self._parameters.read())

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """All names of each of the plain module's parameters, by each of them."""
        return self._parameters.aliases

    def held(self) -> dict[str, Any]:
        """What this rank holds of the plain module's state, under its names."""
        self._gradients.take_edits()
        mains = self._parameters.read().main_weights
        return {**self._module.state_dict(), **{name: weight.detach() for name, weight in mains.items()}}

    def whole(self) -> dict[str, Any]:
        """The plain module's state in the memory of global rank 0, empty elsewhere; every rank must call this."""
        return gather_module(self.held(), self.local(), self._groups)

    def of_optimizer(self, optimizer: Optimizer, names: GroupNames) -> dict[str, Any]:
        """What this rank holds of the plain optimizer's state.

        Args:
            names: for each of its groups, the whole model's parameters in it.
        """
        return self.local().optimizer_state(optimizer, names, self._parameters.held_names)

    def load_module(self, given: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of the plain module's state.

        Raises:
            RuntimeError: on every rank, if names are missing or unknown and strict.
        """
        local, held = self.local(), self.held()
        if strict:
            check_names(local.faults(given, held), self._groups.world)
        mine = local.take_module(given, held)
        with torch.no_grad():
            for name, weight in self._parameters.main_weights.items():
                if name in mine:
                    weight.copy_(mine.pop(name))
        self._module.load_state_dict(mine, strict=False)
        self._gradients.refresh_weights()

    def load_optimizers(
        self, given: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], names: Sequence[GroupNames]
    ) -> None:
        """Load this rank's part of plain optimizers' states; names: as in `of_optimizer`, of each optimizer."""
        local, name_of = self.local(), self._parameters.held_names
        for optimizer, members, state in zip(optimizers, names, given, strict=True):
            optimizer.load_state_dict(local.take_optimizer(state, optimizer, members, name_of))
