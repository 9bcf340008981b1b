"""Contiguous gradient buffers, reduced over the replicas once a step.

    | grad of p0 | pad | grad of p1 | pad | ... | 1 flag a parameter |

Gradients accumulate in float32 (or wider, where the parameter is wider) over microbatches, accumulated batches and
replicas. A parameter's first gradient of a batch is copied into its place and later ones are added there by autograd
itself. The flags at the end say which parameters got any gradient; they are summed with the rest, so that replicas
agree on them without a message of their own.

Between the schedule and `publish` no parameter has a ``.grad``: the Trainer's closure calls zero_grad after the step,
and would erase what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import all_reduce_

_ALIGNMENT = 32  # elements; keeps every view on a boundary of 128 bytes


class _Buffer:
    """The gradients of parameters that share an accumulation dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = tuple(parameters)
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        device = parameters[0].device
        self.flat = torch.zeros(end + len(parameters), dtype=dtype, device=device)
        self.flags = self.flat[end:]
        self.views = tuple(
            self.flat[start : start + p.numel()].view(p.shape) for start, p in zip(offsets, parameters, strict=True)
        )
        self.touched = [False] * len(parameters)

    def settle(self, factor: float) -> None:
        """Clear what got no gradient, set the flags, and multiply once."""
        for view, touched in zip(self.views, self.touched, strict=True):
            if not touched:
                view.zero_()
        if factor != 1.0:
            self.flat.mul_(factor)
        self.flags.copy_(torch.tensor(self.touched, dtype=self.flat.dtype))

    def add_(self, other: _Buffer) -> None:
        """Add the settled gradients of another batch."""
        self.flat.add_(other.flat)
        self.touched = [a or b for a, b in zip(self.touched, other.touched, strict=True)]

    def agree(self) -> None:
        """After the reduction, take over which parameters other replicas touched."""
        if not all(self.touched):
            self.touched = [flag > 0 for flag in self.flags.tolist()]


class GradientBuffers:
    """Gradients of the parameters that a rank owns and trains."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """parameters: each once, in an order that all replicas share."""
        self._parameters = tuple(parameters)
        self._fresh = _make(self._parameters)
        self._summed = self._fresh
        self._where: dict[nn.Parameter, tuple[_Buffer, int]] = {}
        self._index()
        self._is_collecting = False
        self._handles = [p.register_post_accumulate_grad_hook(self._adopt) for p in self._parameters]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters, in order."""
        return self._parameters

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._where

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Within, gradients go into the buffers, which start empty; afterwards no parameter has a ``.grad``."""
        for buffer in self._fresh:
            buffer.touched = [False] * len(buffer.parameters)
        self._clear()
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False
            self._clear()

    def forget_batch(self) -> None:
        """Drop the gradients of the batch, as if nothing had given any."""
        for buffer in self._fresh:
            buffer.touched = [False] * len(buffer.parameters)

    def finish_batch(self, factor: float, *, is_first: bool, is_only: bool) -> None:
        """Multiply the batch's gradients by `factor` and add them to those of its accumulation window.

        is_first: the batch is the first of its window. is_only: the window has no other.
        """
        for buffer in self._fresh:
            buffer.settle(factor)
        if is_only:
            self._summed = self._fresh
        elif is_first:
            spare = self._summed if self._summed is not self._fresh else _make(self._parameters)
            self._summed, self._fresh = self._fresh, spare
            self._index()
        else:
            for total, fresh in zip(self._summed, self._fresh, strict=True):
                total.add_(fresh)

    def reduce(self, group: ProcessGroup) -> None:
        """Sum over the replicas: one all-reduce a buffer."""
        for buffer in self._summed:
            if group.size() > 1:
                all_reduce_(buffer.flat, group)
                buffer.agree()

    def sum_over(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        """Sum the gradients of some parameters over a group whose ranks hold them whole, in one all-reduce."""
        places = [self._place(parameter) for parameter in parameters if parameter in self]
        if not places or group.size() == 1:
            return
        flat = torch.cat([buffer.views[i].reshape(-1) for buffer, i in places])
        all_reduce_(flat, group)
        for (buffer, i), part in zip(
            places, flat.split([buffer.views[i].numel() for buffer, i in places]), strict=True
        ):
            buffer.views[i].copy_(part.view(buffer.views[i].shape))

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The summed gradient of a parameter, in the buffer's dtype; None where no replica gave it any."""
        buffer, i = self._place(parameter)
        return buffer.views[i] if buffer.touched[i] else None

    def view(self, parameter: nn.Parameter) -> Tensor:
        """The place of a parameter's summed gradient, zero where it has none."""
        buffer, i = self._place(parameter)
        return buffer.views[i]

    def mark(self, parameter: nn.Parameter, touched: bool) -> None:
        """Say whether a parameter has a gradient, after it was summed with that of other stages."""
        buffer, i = self._place(parameter)
        buffer.touched[i] = touched

    def publish(self) -> None:
        """Hand the summed gradients to the parameters as ``.grad``; None where there is none."""
        for parameter in self._parameters:
            gradient = self.gradient(parameter)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._clear()

    def _place(self, parameter: nn.Parameter) -> tuple[_Buffer, int]:
        fresh, i = self._where[parameter]
        return self._summed[self._fresh.index(fresh)], i

    def _index(self) -> None:
        self._where = {p: (buffer, i) for buffer in self._fresh for i, p in enumerate(buffer.parameters)}

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _adopt(self, parameter: nn.Parameter) -> None:
        """After autograd added to ``.grad``: move a new gradient into its place."""
        if not self._is_collecting:
            return
        buffer, i = self._where[parameter]
        view = buffer.views[i]
        if parameter.grad is view:
            return
        assert parameter.grad is not None, "the hook runs after a gradient was added"
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if buffer.touched[i]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            buffer.touched[i] = True
        parameter.grad = view if view.dtype == parameter.dtype else None


def _make(parameters: Sequence[nn.Parameter]) -> tuple[_Buffer, ...]:
    """A buffer for each accumulation dtype among the parameters."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(torch.promote_types(parameter.dtype, torch.float32), []).append(parameter)
    return tuple(_Buffer(members, dtype) for dtype, members in by_dtype.items())
