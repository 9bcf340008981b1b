"""Do tensor peers agree on the gradient of what each holds whole?

If not, the plan is wrong: a weight is used on a peer's own part of the data (its heads, its piece of the sequence), and
nobody sums its gradient; or a random draw differs where activations are replicated. Either trains wrongly in silence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import all_gather_dim

_TOLERANCE = 0.05  # of a gradient's norm; a missing sum is of the order of 1
_NEGLIGIBLE = 1e-6  # of the largest norm; smaller gradients are rounding


def disagreements(gradients: Mapping[str, Tensor], group: ProcessGroup) -> list[str]:
    """Names of whole parameters whose gradients differ between the peers of a group; the same on every peer.

    gradients: by name, in an order that the peers share.
    """
    if group.size() == 1 or not gradients:
        return []
    norms = torch.stack([gradient.double().norm() for gradient in gradients.values()])
    sums = torch.stack([gradient.double().sum() for gradient in gradients.values()])
    mine = torch.stack([norms, sums]).cpu()[None]
    everyone = all_gather_dim(mine, group, 0, group.size())
    spread = (everyone.amax(0) - everyone.amin(0)).amax(0)
    largest = everyone[:, 0].amax(0)
    is_off = (spread > _TOLERANCE * largest) & (largest > _NEGLIGIBLE * largest.max())
    return [name for name, off in zip(gradients, is_off.tolist(), strict=True) if off]
