"""Cross-entropy on vocabulary shards: no rank ever holds a row of all logits.

Two all-reduces of N and 2N (with label smoothing 3N) numbers, for N rows (SC'21 section 2.3 names the idea; the
gradient needs none).
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import MAX, all_reduce_
from lightning_ptdp.kernels.cross_entropy import loss_per_row, reduce


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
        targets: [N], class indices or `ignore_index`; the same on all ranks. Any other gives a loss of NaN.
        group: the tensor-parallel group, size t.
        first: the first class of this rank.
        vocabulary: V.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".

    Returns:
        a scalar, or [N]; float32, or wider where the logits are; equal on all ranks.
    """
    losses = loss_per_row(
        logits,
        targets,
        first=first,
        vocabulary=vocabulary,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        highest=lambda peak: all_reduce_(peak, group, MAX),
        total=lambda sums: all_reduce_(sums, group),
    )
    return reduce(losses, targets, ignore_index=ignore_index, reduction=reduction)
