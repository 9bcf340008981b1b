"""Cross-entropy of logits whose classes may lie on several ranks.

Backward keeps the logits and two numbers a row: the gradient is worked out from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_ptdp.kernels import reference
from lightning_ptdp.kernels.library import OPERATIONS, LibraryOp, contiguous_like, is_compiled

Combine = Callable[[Tensor], Tensor]

_ELSEWHERE, _IGNORED = -1, -2  # in place of a target: its class is on another rank; it doesn't count


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of [N, V] logits and [N] int64 targets, in one pass each way and with no copy of the logits.

    Returns:
        a scalar, or [N]; float32, or wider where the logits are. A target that is neither a class nor `ignore_index`
        gives NaN.

    Raises:
        ValueError: shapes, or an unknown reduction.
    """
    if has_torch_function((input, target)):  # logits that are split over ranks; a mode that watches losses
        result: Tensor = handle_torch_function(
            cross_entropy,
            (input, target),
            input,
            target,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return result
    if input.ndim != 2 or target.shape != input.shape[:1] or reduction not in ("mean", "sum", "none"):
        raise ValueError(
            "cross_entropy takes logits [N, V], targets [N] and a reduction of mean, sum or none; got logits "
            f"{tuple(input.shape)}, targets {tuple(target.shape)}, reduction={reduction!r}; flatten leading dims first"
        )
    losses = loss_per_row(
        input, target, vocabulary=input.shape[1], ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return reduce(losses, target, ignore_index=ignore_index, reduction=reduction)


def reduce(losses: Tensor, target: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
    """Losses of [N] rows by "mean" over the targets that are not ignored, "sum", or "none"."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


def stats(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of [N, V]: a largest logit m, the sum of exp(logit - m), and the sum of (logit - m).

    [N] each, float32 or wider. m is finite, so that a row of -inf has the sum 0.
    """
    if is_compiled(logits.device.type, logits.dtype):
        peak, sum_exp, sum_shifted = torch.ops.ptdp.cross_entropy_stats(logits)
        return peak, sum_exp, sum_shifted
    return reference.cross_entropy_stats(logits)


def gradient(
    logits: Tensor, target: Tensor, normalizer: Tensor, scale: Tensor, *, uniform: float, hit: float
) -> Tensor:
    """scale * (exp(logit - normalizer) - uniform, and - hit at the target) in the logits' dtype; 0 where scale is.

    logits: [N, V]. target: [N] int64, negative where no class is hit. normalizer, scale: [N].
    """
    if is_compiled(logits.device.type, logits.dtype):
        result: Tensor = torch.ops.ptdp.cross_entropy_gradient(logits, target, normalizer, scale, uniform, hit)
        return result
    return reference.cross_entropy_gradient(logits, target, normalizer, scale, uniform=uniform, hit=hit)


class _LossPerRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        vocabulary: int,
        ignore_index: int,
        smoothing: float,
        highest: Combine | None,
        total: Combine | None,
    ) -> Tensor:
        local = logits.shape[1]
        at = targets - first
        is_real = targets != ignore_index
        is_mine = is_real & (at >= 0) & (at < local)
        local_peak, sum_exp, sum_shifted = stats(logits)
        peak = highest(local_peak.clone()) if highest is not None else local_peak
        below = local_peak - peak
        picked = logits.gather(1, at.clamp(0, local - 1)[:, None]).squeeze(1).to(peak.dtype) - peak
        terms = [sum_exp * below.exp(), picked.masked_fill(~is_mine, 0.0)]
        if smoothing:
            terms.append(sum_shifted + local * below)
        sums = torch.stack(terms)
        sums = total(sums) if total is not None else sums
        log_sum = sums[0].log()
        loss = log_sum - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - sums[2] / vocabulary)
        is_wrong = (targets < 0) | (targets >= vocabulary)
        loss = loss.masked_fill(is_wrong, float("nan")).masked_fill(~is_real, 0.0)
        at = torch.where(is_mine, at, torch.where(is_real, _ELSEWHERE, _IGNORED))
        ctx.save_for_backward(logits, peak + log_sum, at)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizer, at = ctx.saved_tensors
        scale = grad.to(normalizer.dtype).masked_fill(at == _IGNORED, 0.0)
        uniform, hit = ctx.smoothing / ctx.vocabulary, 1 - ctx.smoothing
        dlogits = gradient(logits, at, normalizer, scale, uniform=uniform, hit=hit)
        return dlogits, None, None, None, None, None, None, None


def loss_per_row(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int = 0,
    vocabulary: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    highest: Combine | None = None,
    total: Combine | None = None,
) -> Tensor:
    """`F.cross_entropy(..., reduction="none")` of logits whose classes may be split over ranks.

    Args:
        logits: [N, V/t], the classes of this rank.
        targets: [N] int64; one that is neither a class nor `ignore_index` gives a loss of NaN.
        first: the first class of this rank.
        vocabulary: V, the classes of all ranks.
        highest, total: reduce a tensor over the ranks by max and by sum; None where one rank has all classes.

    Returns:
        [N], float32, or wider where the logits are.
    """
    losses: Tensor = _LossPerRow.apply(  # type: ignore[no-untyped-call]
        logits, targets, first, vocabulary, ignore_index, label_smoothing, highest, total
    )
    return losses


def _fake_stats(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    peak, sum_exp, sum_shifted = (logits.new_empty((logits.shape[0],), dtype=torch.float32) for _ in range(3))
    return peak, sum_exp, sum_shifted


OPERATIONS.extend((LibraryOp("cross_entropy_stats", _fake_stats), LibraryOp("cross_entropy_gradient", contiguous_like)))
