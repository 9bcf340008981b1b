"""Sees to it that every rank starts from the same weights."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from lightning_ptdp.comm.collectives import broadcast_
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.preflight.compare import differing_items, gather_differing

_CHUNK = 1 << 18  # elements that are summed at once, so that a big table needs no second copy

log = logging.getLogger(__name__)


def agree_on_weights(module: nn.Module, groups: Groups) -> None:
    """Give every rank the values of rank 0, for the parameters and buffers that differ between ranks.

    They differ if processes drew other random numbers when they built the module. It must have the same parameters and
    buffers on all ranks, which `settle_layout` has compared.

    Args:
        module: still whole, with its values or on the meta device.
        groups: of this rank.
    """
    if groups.world.size() == 1:
        return
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        mine = {name: repr(_checksum(tensor)) for name, tensor in tensors.items()}
        differing = list(differing_items(gather_differing({"values": mine}, groups.world).get("values", ())))
        if not differing:
            return
        log.info(
            "initial values of %d tensors differ between ranks (%s, ...): those of rank 0 are taken",
            len(differing),
            differing[0],
        )
        for name in differing:
            broadcast_(tensors[name].data, 0, groups.world)


def _checksum(tensor: Tensor) -> float | None:
    """A number that differs if values do, which is all but certain; None for a tensor on the meta device."""
    if tensor.is_meta:
        return None
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    weights = torch.arange(1, min(_CHUNK, tensor.numel()) + 1, dtype=torch.float64, device=tensor.device)
    for i, part in enumerate(tensor.detach().reshape(-1).split(_CHUNK)):
        total += (part.double() * weights[: len(part)]).sum() * (i % 8191 + 1)
    return float(total.nan_to_num(nan=-1.0))
