"""The parallel forward of each style, on an ordinary module that holds a shard of its weight.

A function here takes the module, the module's own forward, the peers and where the module stands, and returns the
parallel forward, or None where the module's own is right.

Each runs in a class of its own that derives from the module's: what the module's own forward does besides (scaling an
embedding, say) still happens, and `isinstance` holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ptdp.comm.collectives import chunk_sizes, copy_to, gather_from, reduce_from, scatter_to
from lightning_ptdp.tensor_parallel.linears import is_linear, is_transposed
from lightning_ptdp.tensor_parallel.logits import SplitLogits
from lightning_ptdp.tensor_parallel.peers import Peers
from lightning_ptdp.tensor_parallel.sequence import SEQUENCE_DIM, sum_rows
from lightning_ptdp.tensor_parallel.site import Forward, Site


def colwise(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward | None:
    """Input whole, output split along its last dim."""
    if not is_linear(module):
        return None  # a holder of bare parameters, each with an entry of its own
    opens_region = site.opens_region
    is_product = is_transposed(module) or getattr(forward, "__func__", None) is nn.Linear.forward

    def parallel(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if peers.sequence_length not in (None, x.shape[SEQUENCE_DIM]):
            raise ValueError(
                f"a column-parallel {type(module).__name__} was given {tuple(x.shape)}, a part of the sequence (of "
                f"{peers.sequence_length}); under sequence_parallel=True it needs the whole: give the norm before it "
                'the style "sequence_parallel" in tensor_parallel_plan, or use sequence_parallel=False'
            )
        joined = peers.joined(x) if is_product else None
        if joined is None:
            output = _linear(module, forward, peers.copy(x), *args, **kwargs)
        else:
            weight = module.get_parameter("weight")
            bias = getattr(module, "bias", None)
            output = joined.project(peers.copy(x), weight.t() if is_transposed(module) else weight, bias)
        if opens_region and module.training:
            peers.region.enter()
        return output

    return parallel


def colwise_gather_output(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:
    """Input whole, output split and joined again."""
    width = site.weight_shape[1 if is_transposed(module) else 0]

    def parallel(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = _linear(module, forward, peers.copy(x), *args, **kwargs)
        return gather_from(output, peers.group, -1, width)

    return parallel


def vocabulary_head(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:
    """Input whole; output stays split behind `SplitLogits` in training, and is joined at once in evaluation."""
    width = site.weight_shape[0]

    def parallel(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = _linear(module, forward, peers.copy(x), *args, **kwargs)
        peers.forget()
        if torch.is_grad_enabled():
            return SplitLogits.make(output, peers.group, -1, width)
        return gather_from(output, peers.group, -1, width)

    return parallel


def rowwise(
    module: nn.Module,
    forward: Forward,  # noqa: ARG001  its product is done here
    peers: Peers,
    site: Site,  # noqa: ARG001
    *,
    splits_input: bool = False,
) -> Forward | None:
    """Input split along its last dim (or split here), output summed; the bias, which is whole, is added once."""
    if not is_linear(module):
        return None  # a holder of bare parameters, each with an entry of its own
    transposed = is_transposed(module)

    def parallel(x: Tensor) -> Tensor:
        if peers.sequence_length is None:
            peers.region.leave()
        peers.forget()
        if splits_input:
            x = scatter_to(x, peers.group, -1)
        weight = module.get_parameter("weight")
        partial = F.linear(x, weight.t() if transposed else weight)
        output = reduce_from(partial, peers.group) if peers.sequence_length is None else sum_rows(partial, peers)
        bias = getattr(module, "bias", None)
        return output if bias is None else output + bias.to(output.dtype)  # the dtype of `nn.Linear` under autocast

    return parallel


def embedding_rowwise(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:
    """Each peer looks up what it holds; the partial results are summed."""
    assert isinstance(module, nn.Embedding), "checked with the plan"
    vocabulary = site.weight_shape[0]
    sizes = chunk_sizes(vocabulary, peers.size)
    first, held = sum(sizes[: peers.rank]), sizes[peers.rank]
    if module.padding_idx is not None:
        local = module.padding_idx - first
        module.padding_idx = local if 0 <= local < held else None

    def parallel(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_outside = (ids < 0) | (ids >= vocabulary)
        if ids.device.type == "cpu" and bool(is_outside.any()):
            raise IndexError(
                f"an embedding of {vocabulary} rows was asked for indices {ids[is_outside].unique().tolist()[:8]}"
            )
        local = ids - first
        is_mine = (local >= 0) & (local < held)
        found = forward(local.clamp(0, held - 1), *args, **kwargs).masked_fill(~is_mine[..., None], 0.0)
        if ids.device.type != "cpu":
            found = found.masked_fill(is_outside[..., None], float("nan"))  # where raising would wait for the device
        return reduce_from(found, peers.group)

    return parallel


def embedding_colwise(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:  # noqa: ARG001
    """Each peer looks up its part of every vector; the parts are joined."""
    assert isinstance(module, nn.Embedding), "checked with the plan"
    width = module.embedding_dim

    def parallel(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return gather_from(forward(ids, *args, **kwargs), peers.group, -1, width)

    return parallel


def moe_experts(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:  # noqa: ARG001
    """Every peer runs a part of every expert; hidden states and routing weights are whole, outputs are summed."""

    def parallel(hidden: Tensor, *routing: Any, **kwargs: Any) -> Tensor:
        if module.training:
            peers.region.enter()
        copied = [copy_to(item, peers.group) if _is_floating(item) else item for item in routing]
        named = {name: copy_to(item, peers.group) if _is_floating(item) else item for name, item in kwargs.items()}
        output = forward(copy_to(hidden, peers.group), *copied, **named)
        if peers.sequence_length is None:
            peers.region.leave()
        return reduce_from(output, peers.group)

    return parallel


def moe_identity_expert(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:  # noqa: ARG001
    """Returns its input on every peer, which will be summed: so each gives its share."""

    def parallel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(x / peers.size, *args, **kwargs)

    return parallel


def mla_kv_a_proj(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:  # noqa: ARG001
    """The rotary part of the output, its end, goes to every peer's own heads, past the column-parallel projection."""
    width = rotary_width(site)
    assert width is not None, "checked with the plan"

    def parallel(*args: Any, **kwargs: Any) -> Tensor:
        output = forward(*args, **kwargs)
        return torch.cat([output[..., :-width], copy_to(output[..., -width:], peers.group)], dim=-1)

    return parallel


def all_reduce(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward:  # noqa: ARG001
    """Outputs are partial, and summed."""

    def parallel(*args: Any, **kwargs: Any) -> Tensor:
        return reduce_from(forward(*args, **kwargs), peers.group)

    return parallel


def rotary_width(site: Site) -> int | None:
    """How many outputs of a compressed key projection are rotary, as the nearest module around it says."""
    return site.nearest("qk_rope_head_dim")


def _linear(module: nn.Module, forward: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The module's own forward on its shard; for a transposed linear the product, since its forward knows widths."""
    if not is_transposed(module):
        output: Tensor = forward(x, *args, **kwargs)
        return output
    return F.linear(x, module.get_parameter("weight").t(), getattr(module, "bias", None))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
