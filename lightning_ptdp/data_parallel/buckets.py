"""Contiguous gradient buffers, reduced over the replicas once a step.

    | grad of p0 | pad | grad of p1 | pad | ... | 1 flag a parameter |

Gradients accumulate in float32 (or wider, where the parameter is wider) over microbatches, accumulated batches and
replicas. A parameter's first gradient of a batch is copied into its place and later ones are added there by autograd
itself. The flags at the end say which parameters got any gradient; they are summed with the rest, so that replicas
agree on them without a message of their own.

Between the schedule and `MainWeights.publish` no parameter has a ``.grad``: the Trainer's closure calls zero_grad after
the step, and would erase what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from lightning_ptdp.comm.collectives import all_reduce_, reduce_scatter_slices_

_ALIGNMENT = 32  # elements; keeps every view on a boundary of 128 bytes


class _Buffer:
    """The gradients of parameters of one dtype that the same pipeline ranks own.

    touched: for each parameter, whether it got a gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: int) -> None:
        """
        Args:
            parameters: in the order in which their gradients lie.
            replicas: number of equal slices that the gradients must divide into.
        """
        self.parameters = tuple(parameters)
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += _aligned(parameter.numel(), _ALIGNMENT)
        end = _aligned(end, _ALIGNMENT * replicas)
        self.offsets = tuple(offsets)
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        self.flat = torch.zeros(end + len(parameters), dtype=dtype, device=parameters[0].device)
        self.gradients, self.flags = self.flat.split([end, len(parameters)])
        self.views = tuple(
            self.flat[start : start + p.numel()].view(p.shape) for start, p in zip(offsets, parameters, strict=True)
        )
        self.touched = [False] * len(parameters)

    def settle(self, factor: float) -> None:
        """Make a batch's gradients ready to be summed: clear what got none, multiply all, and set the flags."""
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
        """Read off the summed flags which parameters got a gradient on any replica."""
        if not all(self.touched):
            self.touched = [flag > 0 for flag in self.flags.tolist()]


class GradientBuffers:
    """Gradients of the parameters that a rank owns and trains."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        owners: Mapping[nn.Parameter, frozenset[int]] = MappingProxyType({}),
        replicas: int = 1,
    ) -> None:
        """
        Args:
            parameters: each once, in an order that is the same on all replicas.
            owners: the pipeline ranks of each parameter that several of them own. Such parameters lie in buffers of
                their own, at the same offsets on each owner.
            replicas: d, if gradients are reduced by `reduce_to_slices`: buffers are padded so that it divides them.
        """
        self._replicas = replicas
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._fresh: tuple[_Buffer, ...] = ()
        self._summed: tuple[_Buffer, ...] = ()
        self._where: dict[nn.Parameter, tuple[_Buffer, int]] = {}
        self._is_collecting = False
        self.on_nonfinite: Callable[[nn.Parameter], None] | None = None
        """Called with a parameter whose gradient has just become infinite or NaN. To look for one takes a pass over
        each gradient of each microbatch, so None, the default, does not look."""
        self._handles: list[RemovableHandle] = []
        self.extend(parameters, owners)

    def extend(
        self,
        parameters: Sequence[nn.Parameter],
        owners: Mapping[nn.Parameter, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        """Take in more parameters, between two accumulation windows; the other gradients stay where they are.

        Args:
            parameters: to be added, with the same order on all replicas.
            owners: as when the buffers were made.
        """
        self._parameters += tuple(parameters)
        self._fresh += self._make(parameters, owners)
        self._summed = self._fresh
        self._index()
        self._handles += [p.register_post_accumulate_grad_hook(self._adopt) for p in parameters]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters, in order."""
        return self._parameters

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._where

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Gather the gradients of a batch: within the context they go into the buffers, which start empty.

        Afterwards no parameter has a ``.grad``.
        """
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
        """Drop the gradients of the batch, as if it had given none."""
        for buffer in self._fresh:
            buffer.touched = [False] * len(buffer.parameters)

    def finish_batch(self, factor: float, *, is_first: bool, is_only: bool) -> None:
        """Multiply the batch's gradients by a factor, and add them to those of its accumulation window.

        Args:
            factor: what the gradients are multiplied by.
            is_first: whether the batch is the first of its window.
            is_only: whether the window has no other batch.
        """
        for buffer in self._fresh:
            buffer.settle(factor)
        if is_only:
            self._summed = self._fresh
        elif is_first:
            spare = self._summed if self._summed is not self._fresh else self._like(self._fresh)
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

    def reduce_to_slices(self, group: ProcessGroup) -> None:
        """Sum over the replicas, each in its own slice only: one reduce-scatter a buffer, and one sum of flags."""
        for buffer in self._summed:
            if group.size() > 1:
                reduce_scatter_slices_(buffer.gradients, group)
                all_reduce_(buffer.flags, group)
                buffer.agree()

    def layout(self, parameters: Sequence[nn.Parameter]) -> list[tuple[tuple[nn.Parameter, ...], tuple[int, ...], int]]:
        """Describe the buffers that hold these parameters and no others.

        Returns:
            For each its parameters, their offsets in elements, and its length, which the replicas divide.
        """
        asked = set(parameters)
        found = [buffer for buffer in self._fresh if asked.issuperset(buffer.parameters)]
        return [(buffer.parameters, buffer.offsets, len(buffer.gradients)) for buffer in found]

    @property
    def nbytes(self) -> int:
        """Memory of the gradients, without the second set that accumulation over batches keeps."""
        return sum(buffer.flat.nbytes for buffer in self._fresh)

    def is_finite(self) -> bool:
        """Whether every summed gradient of this rank is finite."""
        return all(bool(buffer.gradients.sum().isfinite()) for buffer in self._summed)

    def sum_over(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        """Sum the gradients of some parameters over a group whose ranks hold them whole, in one all-reduce."""
        found = [self._find(parameter) for parameter in parameters if parameter in self]
        if not found or group.size() == 1:
            return
        flat = torch.cat([buffer.views[i].reshape(-1) for buffer, i in found])
        all_reduce_(flat, group)
        for (buffer, i), part in zip(found, flat.split([buffer.views[i].numel() for buffer, i in found]), strict=True):
            buffer.views[i].copy_(part.view(buffer.views[i].shape))

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The summed gradient of a parameter, in the buffer's dtype; None where no replica gave it any."""
        buffer, i = self._find(parameter)
        return buffer.views[i] if buffer.touched[i] else None

    def view(self, parameter: nn.Parameter) -> Tensor:
        """The memory of a parameter's summed gradient, zero if it has none."""
        buffer, i = self._find(parameter)
        return buffer.views[i]

    def mark(self, parameter: nn.Parameter, touched: bool) -> None:
        """Set whether a parameter has a gradient, once it is summed over the pipeline ranks that own it."""
        buffer, i = self._find(parameter)
        buffer.touched[i] = touched

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._clear()

    def _make(
        self, parameters: Sequence[nn.Parameter], owners: Mapping[nn.Parameter, frozenset[int]]
    ) -> tuple[_Buffer, ...]:
        """Make a buffer for each dtype and set of owners."""
        by_kind: dict[object, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_kind.setdefault((parameter.dtype, owners.get(parameter)), []).append(parameter)
        return tuple(_Buffer(members, self._replicas) for members in by_kind.values())

    def _like(self, buffers: Sequence[_Buffer]) -> tuple[_Buffer, ...]:
        return tuple(_Buffer(buffer.parameters, self._replicas) for buffer in buffers)

    def _find(self, parameter: nn.Parameter) -> tuple[_Buffer, int]:
        """The buffer of a parameter's summed gradient, and the parameter's number in it."""
        fresh, i = self._where[parameter]
        return self._summed[self._fresh.index(fresh)], i

    def _index(self) -> None:
        self._where = {p: (buffer, i) for buffer in self._fresh for i, p in enumerate(buffer.parameters)}

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _adopt(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has put into ``.grad`` into its buffer; a hook, run after each addition."""
        if not self._is_collecting:
            return
        buffer, i = self._where[parameter]
        view = buffer.views[i]
        if parameter.grad is view:
            self._look(parameter, view)
            return
        assert parameter.grad is not None, "the hook runs after a gradient was added"
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if buffer.touched[i]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            buffer.touched[i] = True
        parameter.grad = view if view.dtype == parameter.dtype else None
        self._look(parameter, view)

    def _look(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Call `on_nonfinite` if a gradient is not finite."""
        if self.on_nonfinite is not None and not bool(gradient.isfinite().all()):
            self.on_nonfinite(parameter)


def _aligned(length: int, unit: int) -> int:
    return -(-length // unit) * unit
