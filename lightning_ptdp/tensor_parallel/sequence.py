"""Sequence parallelism (arXiv 2205.05198): between split layers each peer works on its part of the sequence.

    block input [b, s/t, h] -> norm (style sequence_parallel) -> all-gather [b, s, h] -> colwise ... rowwise
                            -> reduce-scatter [b, s/t, h] -> dropout, residual

The first block takes its part of a whole input, the last one joins the parts again. What a norm returns is whole, so
that code which reads its shape stays right. Weights used on a part of the sequence have a partial gradient, summed over
the peers at the end of the batch; random draws within a block differ between peers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_ptdp.comm.collectives import gather_from, reduce_scatter_from, scatter_to
from lightning_ptdp.host.torch import pytree
from lightning_ptdp.tensor_parallel.peers import Peers
from lightning_ptdp.tensor_parallel.site import Forward, Site

SEQUENCE_DIM = 1
"""Activations are [b, s, h]."""


def block(module: nn.Module, forward: Forward, peers: Peers, *, is_first: bool, is_last: bool) -> Forward:
    """A block's forward on the peer's part of the sequence."""

    def parallel(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        hidden = leaves[place]
        if is_first:
            _check_length(hidden, peers)
            hidden = scatter_to(hidden, peers.group, SEQUENCE_DIM)
        leaves[place] = hidden
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        peers.sequence_length = hidden.shape[SEQUENCE_DIM] * peers.size
        if module.training:
            peers.region.enter()
        try:
            output = forward(*args, **kwargs)
        finally:
            length, peers.sequence_length = peers.sequence_length, None
            peers.region.leave()
        return _join(output, peers, length) if is_last else output

    return parallel


def _check_length(hidden: Tensor, peers: Peers) -> None:
    length = hidden.shape[SEQUENCE_DIM] if hidden.ndim > SEQUENCE_DIM else 0
    if length % peers.size or not length:
        raise ValueError(
            f"sequence parallelism gives each tensor peer an equal part of dim {SEQUENCE_DIM} of the activations, so "
            f"the sequence must be a multiple of tensor_parallel_size; got activations {tuple(hidden.shape)}, "
            f"tensor_parallel_size={peers.size}; pad the sequences, or use sequence_parallel=False"
        )


def _join(output: Any, peers: Peers, length: int) -> Any:
    """The whole of a block's activation: the first tensor that it returns."""
    leaves, structure = pytree.tree_flatten(output)
    place = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    leaves[place] = gather_from(leaves[place], peers.group, SEQUENCE_DIM, length)
    return pytree.tree_unflatten(leaves, structure)


def norm(module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward | None:  # noqa: ARG001
    """A norm on the peer's part; what it returns is whole."""
    if not site.is_on_sequence_part:
        return None

    def parallel(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        part: Tensor = forward(x, *args, **kwargs)
        if peers.sequence_length is None or x.shape[SEQUENCE_DIM] == peers.sequence_length:
            return part
        return peers.join_sequence(part, SEQUENCE_DIM)

    return parallel


def sum_rows(partial: Tensor, peers: Peers) -> Tensor:
    """What row-parallel products add up to: the peer's part of the sequence."""
    return reduce_scatter_from(partial, peers.group, SEQUENCE_DIM)
