"""What must happen to a module while every rank still holds it whole."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_ptdp.comm.collectives import broadcast_, gather_objects
from lightning_ptdp.comm.groups import Groups


def pin_summaries(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Let summary callbacks describe the whole module, not this rank's part."""
    for callback in trainer.callbacks:
        if isinstance(callback, ModelSummary):
            summary = callback._summary(trainer, module)
            callback._summary = lambda *_, summary=summary: summary  # type: ignore[method-assign]


def agree_on_weights(module: nn.Module, groups: Groups) -> None:
    """Give every rank the values of rank 0, where they differ: processes that were not seeded alike built other weights.

    Raises:
        ValueError: ranks hold parameters or buffers of other names, shapes or dtypes.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        mine = [(name, tuple(t.shape), str(t.dtype), _checksum(t)) for name, t in tensors.items()]
        everyone = gather_objects(mine, groups.world)
        for rank, theirs in enumerate(everyone):
            for own, other in zip(everyone[0], theirs, strict=False):
                if own[:3] != other[:3]:
                    raise ValueError(
                        f"all ranks must build the same module; rank 0 has {own[:3]} where rank {rank} has {other[:3]}"
                    )
            if len(everyone[0]) != len(theirs):
                raise ValueError(
                    f"all ranks must build the same module; rank 0 has {len(everyone[0])} parameters and buffers, rank "
                    f"{rank} {len(theirs)}"
                )
        different = [own[0] for i, own in enumerate(everyone[0]) if any(theirs[i][3] != own[3] for theirs in everyone)]
        if not different:
            return
        rank_zero_info(
            f"initial values of {len(different)} tensors differ between ranks ({different[0]}, ...): those of rank 0 are "
            "taken; call lightning.seed_everything before building the module to make runs repeat"
        )
        for name in different:
            broadcast_(tensors[name].data, 0, groups.world)


def _checksum(tensor: Tensor) -> float | None:
    """A number that differs where values do, near enough; None on the meta device."""
    if tensor.is_meta:
        return None
    values = tensor.detach().reshape(-1)
    weights = torch.arange(1, len(values) + 1, device=tensor.device).remainder_(8191)
    return float((values.double() * weights).sum().nan_to_num(nan=-1.0))
