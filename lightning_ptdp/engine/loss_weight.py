"""How much a microbatch's mean loss counts in the batch's: the number of terms that it is a mean of.

Rule, in this order:
1. ``"weight"`` in the dict that the step returns;
2. the number of real targets of the mean-reduced cross-entropy (or nll_loss) that the step called, or their summed
   class weights; several calls must agree;
3. the number of samples.
If targets were ignored and the weight cannot be told, the batch raises and asks for ``"weight"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_ptdp.kernels.cross_entropy import cross_entropy

_LOSSES = (F.cross_entropy, F.nll_loss, cross_entropy)


@dataclass(frozen=True, slots=True)
class Weight:
    """value: terms that the mean is over. unit: their usual number, so that value / unit is near 1."""

    value: float | Tensor
    unit: float


@dataclass(frozen=True, slots=True)
class _Call:
    positions: int
    terms: Tensor | None  # None: not a mean over terms
    ignored: Tensor  # targets left out


class TargetCounter(TorchFunctionMode):
    """While active, sees the cross-entropy calls that a loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._is_active = False

    def start(self) -> None:
        """Begin to look; from here on each operation costs a little more."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_active = True

    def stop(self) -> None:
        """Look no longer; nothing happens if it never began."""
        if self._is_active:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES and torch.is_grad_enabled():
            self.calls.append(_describe(*args, **kwargs))
        return func(*args, **kwargs)


def _describe(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,  # noqa: ARG001  the signature is PyTorch's
) -> _Call:
    is_mean = reduction == "mean" and size_average in (None, True) and reduce in (None, True)
    with torch.no_grad():
        if target.is_floating_point():  # probabilities of every class: nothing is ignored
            positions = input.numel() // input.shape[1 if input.ndim > 1 else 0]
            return _Call(positions, torch.tensor(float(positions)) if is_mean else None, torch.zeros(()))
        real = target != ignore_index
        terms = real.sum() if weight is None else weight[target.clamp(min=0)].where(real, 0.0).sum()
        return _Call(target.numel(), terms if is_mean else None, target.numel() - real.sum())


def weigh(output: Any, calls: list[_Call], num_samples: int) -> Weight:
    """The weight of a microbatch whose step returned `output` and made these cross-entropy calls.

    Raises:
        ValueError: targets were ignored and the weight cannot be told, or "weight" is negative or not one number.
    """
    if isinstance(output, Mapping) and "weight" in output:
        return _given(output["weight"])
    means = [call for call in calls if call.terms is not None]
    if means and len(means) == len(calls):
        first = means[0]
        assert first.terms is not None, "of the calls that are means"
        if len(means) == 1 or all(
            call.positions == first.positions and torch.equal(call.terms, first.terms)  # type: ignore[arg-type]
            for call in means
        ):
            return Weight(first.terms, float(max(first.positions, 1)))
    if any(bool(call.ignored) for call in calls):
        seen = [f"{call.positions} targets, {int(call.ignored)} ignored" for call in calls]
        raise ValueError(
            "the step ignores targets, and how much each microbatch counts cannot be told from its "
            f"{len(calls)} cross-entropy calls ({'; '.join(seen)}); return the number of terms that the loss is a mean "
            'of: {"loss": loss, "weight": number_of_real_targets}'
        )
    return Weight(float(num_samples), float(max(num_samples, 1)))


def _given(value: Any) -> Weight:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f'"weight" is one number a step; got a tensor of shape {tuple(value.shape)}')
        value = value.detach().reshape(())
        return Weight(value, 1.0)
    if not isinstance(value, int | float) or value < 0:
        raise ValueError(f'"weight" is the number of terms that the loss is a mean of, at least 0; got {value!r}')
    return Weight(float(value), float(value) or 1.0)
