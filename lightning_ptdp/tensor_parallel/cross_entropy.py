"""Cross-entropy on vocabulary shards: no rank ever holds a row of all logits.

Two all-reduces of N and 2N (with label smoothing 3N) numbers, for N rows (SC'21 section 2.3 names the idea; the
gradient needs none).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import MAX, all_reduce_

_CHUNK_BYTES = 1 << 24


class _LossPerRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: ProcessGroup,
        first: int,
        vocabulary: int,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        rows, local = logits.shape
        at = targets - first
        is_real = targets != ignore_index
        is_mine = is_real & (at >= 0) & (at < local)
        at = at.clamp(0, local - 1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        peak = all_reduce_(logits.amax(-1).to(wide), group, MAX)
        sums = torch.empty((3 if smoothing else 2, rows), dtype=wide, device=logits.device)
        for part in _chunks(logits):
            shifted = logits[part].to(wide) - peak[part, None]
            if smoothing:
                sums[2, part] = shifted.sum(-1)
            sums[0, part] = shifted.exp_().sum(-1)
        picked = logits.gather(1, at[:, None]).squeeze(1).to(wide) - peak
        sums[1] = picked.masked_fill(~is_mine, 0.0)
        all_reduce_(sums, group)
        log_sum = sums[0].log()
        loss = log_sum - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - sums[2] / vocabulary)
        ctx.save_for_backward(logits, peak + log_sum, at, is_mine, is_real)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return loss.masked_fill(~is_real, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        logits, normalizer, at, is_mine, is_real = ctx.saved_tensors
        scale = gradient.masked_fill(~is_real, 0.0)
        result = torch.empty_like(logits)
        for part in _chunks(logits):
            probability = (logits[part].to(normalizer.dtype) - normalizer[part, None]).exp_()
            if ctx.smoothing:
                probability -= ctx.smoothing / ctx.vocabulary
            hit = is_mine[part].to(probability.dtype).mul_(1 - ctx.smoothing)
            probability.scatter_add_(1, at[part, None], -hit[:, None])
            result[part] = probability.mul_(scale[part, None])
        return result, None, None, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Rows in runs whose float32 copy is small."""
    rows = max(1, _CHUNK_BYTES // (4 * max(1, logits.shape[1])))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: ProcessGroup,
    *,
    first: int,
    vocabulary: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy` of logits whose classes are split over a group.

    Args:
        logits: [N, V/t], the rank's classes.
        targets: [N], class indices or `ignore_index`; the same on all ranks.
        group: the tensor-parallel group, size t.
        first: the first class of this rank.
        vocabulary: V.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".

    Returns:
        a scalar, or [N]; float32, or wider where the logits are; equal on all ranks.
    """
    losses = _LossPerRow.apply(logits, targets, group, first, vocabulary, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    assert isinstance(losses, Tensor), "an autograd function of tensors gives one"
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()
