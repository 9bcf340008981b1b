"""Products of a joined sequence that keep a peer's part of it for backward, and gather the rest again there.

    forward     part [b, s/t, k] --all-gather--> whole [b, s, k] --W--> [b, s, n]     kept: part, W
    backward    part --all-gather--> whole, for the gradient of W

Sequence parallelism would otherwise keep t times what it splits (arXiv 2205.05198, section 4.2.2). One gather serves
all projections of one input.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from lightning_ptdp.comm.collectives import all_gather_dim
from lightning_ptdp.host.torch import version_of


class Joined:
    """A sequence that was joined from the parts of all peers, and can be again."""

    def __init__(self, whole: Tensor, part: Tensor, group: ProcessGroup, dim: int) -> None:
        self.whole, self.part = whole, part
        self._version = version_of(whole)
        self._gather = _Gather(group, dim)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor is the joined one, unchanged."""
        return tensor is self.whole and version_of(tensor) == self._version

    def anew(self) -> Joined:
        """The same, for the projections of a second forward."""
        other = copy.copy(self)
        other._gather = self._gather.anew()
        return other

    def project(self, whole: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of a differentiable copy of the whole; weight: [n, k]."""
        device = whole.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else whole.dtype
        if weight.requires_grad and torch.is_grad_enabled():
            self._gather.expected += 1
        own_bias = None if bias is None else bias.to(dtype)
        product: Tensor = _GatheredLinear.apply(  # type: ignore[no-untyped-call]
            whole.to(dtype), self.part.detach(), weight.to(dtype), own_bias, self._gather
        )
        return product


class _Gather:
    """Gathers the whole at the first of `expected` uses, and lets go of it at the last."""

    def __init__(self, group: ProcessGroup, dim: int) -> None:
        self._group, self._dim = group, dim
        self.expected = 0
        self._left = 0
        self._whole: Tensor | None = None

    def anew(self) -> _Gather:
        return _Gather(self._group, self._dim)

    def whole(self, part: Tensor) -> Tensor:
        whole = self._whole
        if whole is None:
            whole = all_gather_dim(part, self._group, self._dim, part.shape[self._dim] * self._group.size())
            self._left = self.expected
        self._left -= 1
        self._whole = whole if self._left else None
        return whole


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, gather: _Gather) -> Tensor:
        ctx.gather = gather
        ctx.save_for_backward(part, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_whole, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        of_weight = None
        if needs_weight:
            of_weight = rows.t() @ ctx.gather.whole(part).to(weight.dtype).flatten(0, -2)
        return (
            gradient @ weight if needs_whole else None,
            None,
            of_weight,
            rows.sum(0) if needs_bias else None,
            None,
        )
