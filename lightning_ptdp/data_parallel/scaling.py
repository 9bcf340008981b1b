"""Finds user hooks that scale the gradients of one model by different numbers on different ranks.

``torch.nn.utils.clip_grad_norm_`` does that: it divides by the norm of this rank's part of the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import all_gather_dim

_ELEMENTS = 8  # of each gradient so many are remembered
_TOLERANCE = 1e-2  # relative; coarse enough for elements in 16 bits


class GradientSample:
    """A few elements of each gradient, as they were when the sample was taken."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.grad is not None]
        self._before = self._now()

    def _now(self) -> Tensor:
        parts = [p.grad.reshape(-1)[:_ELEMENTS].double() for p in self._parameters if p.grad is not None]
        return torch.cat(parts) if parts else torch.zeros(0)

    def factor(self) -> float:
        """Tell what all elements were multiplied by since.

        Returns:
            The factor. NaN if it is not one number for all; or if all elements had one magnitude, for then clipping by
            value would look like scaling.
        """
        now = self._now()
        if len(now) != len(self._before):
            return math.nan
        chosen = self._before != 0
        before, ratios = self._before[chosen], (now / self._before)[chosen]
        return math.nan if _are_near(before.abs()) or not _are_near(ratios) else float(ratios[0])


def _are_near(values: Tensor) -> bool:
    """Whether no two values differ by more than the tolerance, relative to the largest."""
    if not len(values):
        return True
    low, high = values.aminmax()
    return bool(high - low <= _TOLERANCE * values.abs().max())


def check_scaled_alike(sample: GradientSample, group: ProcessGroup, ranks: Sequence[int]) -> None:
    """Raise on every rank of a group if its ranks scaled their gradients by different numbers.

    Gradients that were edited in another way, element by element, pass.

    Args:
        sample: of this rank's gradients, before hooks could change them.
        group: the ranks that hold the model once, each a part.
        ranks: their global numbers.

    Raises:
        ValueError: each rank scaled its own part by one number, and these differ.
    """
    mine = torch.tensor([sample.factor()], dtype=torch.float64)
    factors = all_gather_dim(mine, group, 0, group.size()).tolist()
    known = [factor for factor in factors if not math.isnan(factor)]
    if known and max(known) - min(known) > _TOLERANCE * max(map(abs, known)):
        seen = ", ".join(
            f"rank {rank} by {factor:.4g}" for rank, factor in zip(ranks, factors, strict=True) if factor in known
        )
        raise ValueError(
            f"hooks scaled the gradients of one model by different numbers ({seen}); each rank holds a part of the "
            "model, and torch.nn.utils.clip_grad_norm_ sees the norm of that part alone: call "
            "self.clip_gradients(optimizer, gradient_clip_val=...), or take the norm of the whole model, which is the "
            "same on every rank, from self.trainer.strategy.gradient_norm(); to weigh layers differently use parameter "
            "groups"
        )
