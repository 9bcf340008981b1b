"""Optimizers' parameter groups: those of the whole model, of which a rank's optimizers hold what it owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from lightning_ptdp.engine.gradients import Gradients
from lightning_ptdp.engine.parameters import Parameters

Groups = list[list[nn.Parameter]]


class WholeGroups:
    """The groups of a run's optimizers as they are in one process, hollow parameters included.

    It also keeps the gradient buffers to what the optimizers train.
    """

    def __init__(
        self, parameters: Parameters, gradients: Gradients, *, shards: bool, former: WholeGroups | None = None
    ) -> None:
        """Know the groups of an earlier run, if any.

        Args:
            shards: whether replicas share out what optimizers step.
            former: of the run whose optimizers go on.
        """
        self._parameters, self._gradients, self._shards = parameters, gradients, shards
        self._members: list[Groups] = [] if former is None else former._members

    # -- whole groups ------------------------------------------------------------------------------------------------

    def hide(self, optimizers: Sequence[Optimizer]) -> None:
        """Take note of the optimizers' whole groups, then leave them what this rank owns; a group may become empty."""
        table = self._parameters
        hollow = table.hollow
        self._members = [
            [[table.parameter_of(p) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        for optimizer, groups in zip(optimizers, self._members, strict=True):
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [table.weight_of(p) for p in members if p not in hollow]
            for parameter in hollow & optimizer.state.keys():
                del optimizer.state[parameter]

    @contextmanager
    def shown(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Within, module and optimizers list the whole model's parameters, which may be changed."""
        with self._parameters.whole():
            for optimizer, groups in zip(optimizers, self._members, strict=True):
                for group, members in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = members
            try:
                yield
            finally:
                self.hide(optimizers)

    def names(self, optimizers: Sequence[Optimizer], module: nn.Module) -> list[list[list[str]]]:
        """The plain names of the whole model's parameters, by optimizer and group.

        Raises:
            RuntimeError: the groups were changed in a way that no checkpoint can hold.
        """
        fault = self.follow(optimizers)
        if fault is not None:
            raise RuntimeError(fault)
        with self._parameters.whole():
            name_of = {parameter: name for name, parameter in module.named_parameters()}
        try:
            return [[[name_of[p] for p in group] for group in groups] for groups in self._members]
        except KeyError:
            raise RuntimeError(
                "the optimizers hold parameters of another module than the Trainer's, which was replaced since `fit`; "
                "save the checkpoint before, or its weights alone (weights_only=True)"
            ) from None

    def follow(self, optimizers: Sequence[Optimizer]) -> str | None:
        """Take over changes made while the groups were not shown, if this rank sees all of them; else what is wrong."""
        table = self._parameters
        hollow = table.hollow
        found = [[[id(p) for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]
        mine = [
            [[id(table.weight_of(p)) for p in group if p not in hollow] for group in groups] for groups in self._members
        ]
        if found == mine:
            return None
        if hollow:
            return (
                "an optimizer's parameter groups were changed where a rank sees only what it owns, so that ranks would "
                "hold different groups; change them in a BaseFinetuning callback, or within "
                "`with trainer.strategy.whole_model():`, on every rank"
            )
        self.hide(optimizers)
        return None

    # -- what is trained ---------------------------------------------------------------------------------------------

    def trained(self, optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
        """The module's parameters that the optimizers train here."""
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        return [p for p in dict.fromkeys(map(self._parameters.parameter_of, held)) if p.requires_grad]

    def stepped(self, optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
        """What the optimizers step for them."""
        return [self._parameters.weight_of(p) for p in self.trained(optimizers)]

    def bind(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers step main weights, and buffers collect gradients for them."""
        mains = self._gradients.bind(self.trained(optimizers), shards=self._shards)
        for optimizer in optimizers:
            mains.install(optimizer)

    def keep_up(self, optimizers: Sequence[Optimizer], *, is_first: bool) -> str | None:
        """Make other buffers where parameters were frozen, unfrozen or added; or say what is wrong with it.

        Args:
            is_first: whether the batch that follows is the first of an accumulation window.
        """
        if self._gradients.follows(self.trained(optimizers)):
            return None
        if not is_first:
            return (
                "parameters were frozen or unfrozen within a window of accumulate_grad_batches, whose gradients are "
                "summed already; do it before the first batch of a window, at the start of an epoch for example"
            )
        fault = self.follow(optimizers)
        if fault is None:
            self.bind(optimizers)
        return fault
