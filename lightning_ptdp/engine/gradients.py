"""What becomes of gradients between autograd and the optimizer.

collect     autograd adds each microbatch's into buffers, where `zero_grad` does not see them
settle      a batch has ended: multiply by what its scale left to do
reduce      a window has ended: sum over tensor peers where a weight needs it, over the stages that share a
            parameter, over replicas; then publish as `.grad` of what optimizers step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_ptdp.comm.collectives import MIN, all_reduce_, gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.buckets import GradientBuffers
from lightning_ptdp.data_parallel.clip import total_norm
from lightning_ptdp.data_parallel.main_weights import MainWeights
from lightning_ptdp.data_parallel.manual import ManualGradients
from lightning_ptdp.data_parallel.tied import SharedGradients
from lightning_ptdp.engine.batch_run import Window
from lightning_ptdp.engine.parameters import Parameters
from lightning_ptdp.tensor_parallel.agreement import disagreements


class Gradients:
    """The gradients of one module's parameters on one rank."""

    def __init__(
        self, parameters: Parameters, groups: Groups, device: torch.device, *, checks_agreement: bool = True
    ) -> None:
        """Take note of the table; nothing is followed before `bind` or `bind_manual`.

        Args:
            checks_agreement: whether tensor peers compare the first gradients of what each holds whole.
        """
        self._parameters, self._groups, self._device = parameters, groups, device
        self._checks_agreement = checks_agreement
        self._buffers: GradientBuffers | None = None
        self.manual: ManualGradients | None = None
        self._shared: SharedGradients | None = None
        self._shards = False
        self._summed: list[nn.Parameter] = []
        self._replicated: dict[str, nn.Parameter] = {}
        self._has_agreed = False
        self._is_reduced = True  # whether the last accumulation window is complete
        self._first_nonfinite = ""
        self._where: Callable[[], str | None] = _nowhere

    @property
    def buffers(self) -> GradientBuffers:
        """Where gradients are until they are published."""
        assert self._buffers is not None, "bind comes before the first batch"
        return self._buffers

    # -- what is followed --------------------------------------------------------------------------------------------

    def bind(self, trained: Sequence[nn.Parameter], *, shards: bool = False) -> MainWeights:
        """Make gradient buffers and main weights for what optimizers train and this rank owns; returns the latter.

        Called again when that changes, between two accumulation windows.

        Args:
            trained: parameters of the module.
            shards: whether replicas share the main weights out; then those that are no longer trained keep their place.
        """
        table, shared = self._parameters.read(), self._parameters.shared()
        owners = {member.parameter: member.owners for member in shared if member.parameter is not None}
        mains, self._shards = table.mains, shards
        if shards and self._buffers is not None and mains is not None:
            added = [p for p in trained if p not in self._buffers]
            self._buffers.extend(added, owners)
            mains.extend(added)
        else:
            replicas = self._groups.data if shards else None
            self.release()
            self._buffers = GradientBuffers(trained, owners, 1 if replicas is None else replicas.size())
            mains = MainWeights(self._buffers, replicas, None if shards else mains)
        table.mains = mains
        table.read()
        bound = {p: table[p] for p in self._buffers.parameters}
        self._summed = [p for p, row in bound.items() if row.name in table.placement.summed]
        self._replicated = {row.name: p for p, row in bound.items() if row.shard is None}
        self._has_agreed = not self._checks_agreement
        self._shared = SharedGradients(shared, self._groups, self._device)
        return mains

    def bind_manual(self) -> None:
        """Follow the backwards of manual optimization."""
        self.release()
        table, groups = self._parameters.read(), self._groups
        self.manual = ManualGradients(table.names, table.placement.summed, tensor=groups.tensor, data=groups.data)

    def follows(self, trained: Sequence[nn.Parameter]) -> bool:
        """Whether the buffers are for these parameters of the module."""
        if self._buffers is None:
            return False
        bound = set(self._buffers.parameters)
        return bound.issuperset(trained) if self._shards else bound == set(trained)

    def release(self) -> None:
        """Drop the buffers, or what follows the user's own backwards.

        Main weights stay in the table, for a checkpoint after the run.
        """
        if self._buffers is not None:
            self._buffers.release()
        if self.manual is not None:
            self.manual.release()
        self._buffers, self._shared, self.manual = None, None, None

    # -- a batch, a window -------------------------------------------------------------------------------------------

    def collect(self) -> AbstractContextManager[None]:
        """Within, backwards add to the buffers."""
        return self.buffers.collect()

    def settle(self, factor: float, window: Window, *, is_skipped: bool) -> None:
        """Multiply the batch's gradients by what its scale left to do.

        Args:
            is_skipped: whether there are none, as the step left the batch out.

        Raises:
            RuntimeError: the window was complete already, and its gradients reduced.
        """
        if self._is_reduced and not window.is_first:
            raise RuntimeError(
                "a batch ran after its accumulation window was complete: optimizer_step called its closure again, and "
                "what is reduced already would be reduced again; call the closure once, or use "
                "accumulate_grad_batches=1"
            )
        self._is_reduced = False
        if is_skipped:
            self.buffers.forget_batch()
        self.buffers.finish_batch(factor, is_first=window.is_first, is_only=window.is_first and window.is_last)

    def reduce(self) -> None:
        """Sum the window's gradients over all who share them, then publish them.

        Copies of a tied weight get the same bits: they lie in buffers of the same layout, and are summed before the
        replicas are, which may keep only a slice.
        """
        assert self._shared is not None, "made with the buffers"
        assert self._parameters.mains is not None, "made with the buffers"
        self._is_reduced = True
        self.buffers.sum_over(self._summed, self._groups.tensor)
        self._check_agreement()
        self._shared.reduce(self.buffers)
        if self._shards:
            self.buffers.reduce_to_slices(self._groups.data)
        else:
            self.buffers.reduce(self._groups.data)
        self._parameters.mains.publish()

    def _check_agreement(self) -> None:
        """After the first batch: tensor peers must have the same gradient for what each holds whole.

        Raises:
            ValueError: they do not.
        """
        if self._has_agreed:
            return
        self._has_agreed = True
        found = {name: self.buffers.gradient(p) for name, p in self._replicated.items()}
        off = disagreements({name: g for name, g in found.items() if g is not None}, self._groups.tensor)
        if off:
            raise ValueError(
                f"tensor-parallel peers disagree on the gradients of {off}, which each holds whole: they are used on a "
                "peer's own heads or part of the sequence, or a random draw between split layers differs; give them "
                'the style "replicated_with_grad_allreduce" in tensor_parallel_plan'
            )

    def norm(self, stepped: Sequence[nn.Parameter]) -> Tensor:
        """The norm of the published gradients over the whole model, each element counted by one of its owners.

        Args:
            stepped: what optimizers hold.
        """
        mine = [p.grad for p in stepped if p.grad is not None and self._parameters[p].counts]
        return total_norm(mine, self._groups.world if self._shards else self._groups.replica, self._device)

    # -- finite or not -----------------------------------------------------------------------------------------------

    def are_finite(self) -> bool:
        """Whether all reduced gradients of all ranks are."""
        return bool(all_reduce_(torch.tensor(int(self.buffers.is_finite())), self._groups.world, MIN))

    def watch(self, where: Callable[[], str | None]) -> None:
        """Look at each gradient of the next batch as it comes, until `refuse_nonfinite`.

        Args:
            where: tells what the rank is at, such as "stage 1, microbatch 0"; None between batches.
        """
        self._first_nonfinite, self._where = "", where
        self.buffers.on_nonfinite = self._note_nonfinite

    def _note_nonfinite(self, parameter: nn.Parameter) -> None:
        where = self._where()
        if not self._first_nonfinite and where is not None:
            self._first_nonfinite = f"{self._parameters[parameter].name!r} on {where}"

    def refuse_nonfinite(self, scale: float | None) -> None:
        """Raise on every rank if any saw a gradient that is not finite in the batch that was watched.

        Args:
            scale: of the loss; None where it has none.

        Raises:
            FloatingPointError: with the first parameter, stage and microbatch of each such rank.
        """
        self.buffers.on_nonfinite = None
        seen = [text for text in gather_objects(self._first_nonfinite, self._groups.world) if text]
        if seen:
            scaled = "" if scale is None else f" at loss scale {scale:g}, the lowest"
            raise FloatingPointError(
                f"gradients are not finite{scaled}: first that of {'; '.join(seen)}; look at the loss and the data of "
                "that batch, lower the learning rate, clip gradients, or train in bfloat16"
            )

    # -- main weights ------------------------------------------------------------------------------------------------

    def refresh_weights(self) -> None:
        """After the optimizers stepped: bring the module's parameters up to date."""
        if self._parameters.mains is not None:
            self._parameters.mains.refresh()

    def take_edits(self) -> None:
        """Before optimizers step, or states are read: let main weights follow what was done to the module's own."""
        if self._parameters.mains is not None:
            self._parameters.mains.take_edits()


def _nowhere() -> None:
    """Tells nothing: no batch is watched."""
