"""Applies a placement: cuts parameters in place, and gives modules their parallel forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.own_class import put_on
from lightning_ptdp.random_streams import SplitRegion
from lightning_ptdp.tensor_parallel import forwards, sequence
from lightning_ptdp.tensor_parallel.peers import Peers
from lightning_ptdp.tensor_parallel.placement import Placement
from lightning_ptdp.tensor_parallel.site import Forward, Site
from lightning_ptdp.tensor_parallel.styles import STYLES

_PEERS = "_ptdp_peers"

ValueOf = Callable[[nn.Parameter], Tensor]


def convert(
    module: nn.Module,
    placement: Placement,
    group: ProcessGroup,
    device: torch.device,
    blocks: str | None = None,
    value_of: ValueOf = attrgetter("data"),
) -> Peers:
    """Turn the owned part of a module into this rank's shard of it.

    Parameters stay the same objects under the same names, so that optimizers, tied weights and state dicts keep them.
    Modules without registered parameters of their own (hollow ones) are left alone. A second call does nothing.

    device: where the rank computes. blocks: name of the list of blocks that run on parts of the sequence, if any do.
    value_of: the whole value of a parameter that is cut, asked for once.

    Returns what the parallel forwards share.
    """
    known: Peers | None = module.__dict__.get(_PEERS)
    if known is not None:
        return known
    peers = module.__dict__[_PEERS] = Peers(group, SplitRegion(group.rank(), device))
    owned = dict(module.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in owned.items()}
    _cut(owned, placement, peers, value_of)
    for path, name in placement.styles.items():
        style = STYLES[name]
        make = forwards.vocabulary_head if path in placement.heads else style.forward
        runs_here = style.needs_no_parameters or any(parameter.startswith(f"{path}.") for parameter in owned)
        if make is not None and runs_here:
            site = Site(
                module,
                path,
                weight_shape=shapes.get(f"{path}.weight", ()),
                opens_region=path in placement.regions,
                is_on_sequence_part=blocks is not None and path.startswith(f"{blocks}."),
            )
            _give_forward(module.get_submodule(path), partial(make, site=site), peers)
    if blocks is not None:
        _split_sequence(module, blocks, peers)
    for name in placement.sizes:
        path, _, leaf = name.rpartition(".")
        holder = module.get_submodule(path)
        setattr(holder, leaf, getattr(holder, leaf) // peers.size)
    return peers


def _split_sequence(module: nn.Module, blocks: str, peers: Peers) -> None:
    """Run the owned blocks on the peer's part of the sequence."""
    members = list(module.get_submodule(blocks).children())
    for i, member in enumerate(members):
        if any(True for _ in member.parameters()):
            make = partial(sequence.block, is_first=i == 0, is_last=i == len(members) - 1)
            _give_forward(member, make, peers)


def _cut(owned: dict[str, nn.Parameter], placement: Placement, peers: Peers, value_of: ValueOf) -> None:
    done: set[nn.Parameter] = set()
    for name, parameter in owned.items():
        shard = placement.shards.get(name)
        if shard is not None and parameter not in done:
            parameter.data = shard.cut(value_of(parameter), peers.rank, peers.size)
            done.add(parameter)


def _give_forward(module: nn.Module, make: Callable[[nn.Module, Forward, Peers], Forward | None], peers: Peers) -> None:
    """Swap the class for one whose forward is parallel, around the module's own, if there is to be one.

    Layers run as they are inside what a user compiles, between its graphs: a compiler is not to see the collectives.
    """
    own = module.__dict__.get("forward") or type(module).forward.__get__(module)
    parallel = make(module, own, peers)
    if parallel is None:
        return
    if not any(True for _ in module.children()):
        parallel = torch.compiler.disable(parallel)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return parallel(*args, **kwargs)

    module.__dict__.pop("forward", None)
    put_on(module, {"forward": forward})
