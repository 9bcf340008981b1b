"""Gradients of manual optimization: the user runs backwards, and ranks agree on the gradients after each.

a backward     adds to ``.grad``; if a weight is used on each tensor peer's own part of activations, its gradient is
               summed over the peers at once
`settle`       averages over the replicas what was added since the last call
`check`        refuses a step of an optimizer if gradients are left that were not averaged
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from torch import nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import average_gradients, summed_copy


class ManualGradients:
    """Follows the backwards that a user's step runs by itself, by hooks on the parameters."""

    def __init__(
        self, names: Mapping[nn.Parameter, str], summed: Iterable[str], *, tensor: ProcessGroup, data: ProcessGroup
    ) -> None:
        """
        Args:
            names: of the rank's parameters, in an order that is the same on all replicas.
            summed: names of those whose gradients are summed over tensor peers.
            tensor: the tensor peers.
            data: the replicas.
        """
        self._names, self._data = names, data
        self._unsettled: set[nn.Parameter] = set()
        self._handles = []
        for parameter, name in names.items():
            was = parameter.requires_grad
            parameter.requires_grad_(True)  # hooks of a frozen one wait until it is thawed
            if name in summed:
                self._handles.append(parameter.register_hook(partial(summed_copy, group=tensor)))
            if data.size() > 1:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._unsettled.add))
            parameter.requires_grad_(was)

    def settle(self) -> None:
        """Average new gradients over the replicas; one that has none counts as zero if another has one."""
        average_gradients(self._names, self._unsettled, self._data)
        self._unsettled.clear()

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse to step parameters with gradients of one replica alone.

        Raises:
            RuntimeError: a gradient of these parameters was not averaged.
        """
        left = [self._names[p] for p in parameters if p in self._unsettled and p.grad is not None]
        if left:
            raise RuntimeError(
                f"an optimizer steps with gradients of one replica out of {self._data.size()}: those of {left[:3]}"
                f"{' and others' if len(left) > 3 else ''} were not averaged; call self.manual_backward(loss), not "
                "loss.backward(), and leave the last backward before a step outside strategy.block_backward_sync()"
            )

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
