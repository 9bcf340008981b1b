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
from lightning_ptdp.tensor_parallel.forwards import Forward
from lightning_ptdp.tensor_parallel.peers import Peers
from lightning_ptdp.tensor_parallel.placement import Placement, is_transposed, rotary_width

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
    widths = {name: tuple(parameter.shape) for name, parameter in owned.items()}
    _cut(owned, placement, peers, value_of)
    for path, style in placement.styles.items():
        child = module.get_submodule(path)
        if _is_owned(path, style, owned):
            make = _maker(path, style, module, widths, placement) if style != "sequence_parallel" else None
            if style == "sequence_parallel" and blocks is not None and path.startswith(f"{blocks}."):
                make = sequence.norm
            if make is not None:
                _give_forward(child, make, peers)
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


def _is_owned(path: str, style: str, owned: dict[str, nn.Parameter]) -> bool:
    """Whether a module runs on this rank: it has parameters here, or none anywhere."""
    mine = any(name.startswith(f"{path}.") for name in owned)
    return mine or style in ("moe_identity_expert", "all_reduce")


def _maker(  # noqa: PLR0911  one return a style
    path: str, style: str, module: nn.Module, widths: dict[str, tuple[int, ...]], placement: Placement
) -> Callable[[Any, Forward, Peers], Forward] | None:
    """What makes the parallel forward of a style; None where the module's own is right."""
    child = module.get_submodule(path)
    if path in placement.heads:
        width = widths[f"{path}.weight"][0]
        return lambda m, f, p: forwards.vocabulary_head(m, f, p, width=width)
    if style in ("colwise", "packed_colwise", "packed_qkv_colwise"):
        if not _is_linear(child):
            return None  # a holder of bare parameters, each with an entry of its own
        opens = path in placement.regions
        return lambda m, f, p: forwards.colwise(m, f, p, opens_region=opens)
    if style == "colwise_gather_output":
        shape = widths[f"{path}.weight"]
        width = shape[1] if is_transposed(child) else shape[0]
        return lambda m, f, p: forwards.colwise_gather_output(m, f, p, width=width)
    if style in ("rowwise", "packed_rowwise", "rowwise_split_input"):
        if not _is_linear(child):
            return None
        return lambda m, f, p: forwards.rowwise(m, f, p, splits_input=style == "rowwise_split_input")
    if style == "embedding_rowwise":
        return lambda m, f, p: forwards.embedding_rowwise(m, f, p, vocabulary=widths[f"{path}.weight"][0])
    if style == "mla_kv_a_proj":
        rotary = rotary_width(module, path)
        assert rotary is not None, "checked with the plan"
        return lambda m, f, p: forwards.mla_kv_a_proj(m, f, p, width=rotary)
    simple: dict[str, Callable[[Any, Forward, Peers], Forward]] = {
        "embedding_colwise": forwards.embedding_colwise,
        "moe_tp_experts": forwards.moe_experts,
        "moe_identity_expert": forwards.moe_identity_expert,
        "all_reduce": forwards.all_reduce,
    }
    return simple.get(style)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def _give_forward(module: nn.Module, make: Callable[[Any, Forward, Peers], Forward], peers: Peers) -> None:
    """Swap the class for one whose forward is parallel, around the module's own.

    Layers run as they are inside what a user compiles, between its graphs: a compiler is not to see the collectives.
    """
    own = module.__dict__.get("forward") or type(module).forward.__get__(module)
    parallel = make(module, own, peers)
    if not any(True for _ in module.children()):
        parallel = torch.compiler.disable(parallel)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return parallel(*args, **kwargs)

    module.__dict__.pop("forward", None)
    put_on(module, {"forward": forward})
