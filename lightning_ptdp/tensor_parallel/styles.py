"""The tensor-parallel styles, a row each: how a parameter is cut, what the forward becomes, what modules it is for.

A plan gives styles to modules by name, and to bare parameters of a module. The words are Hugging Face's, plus a few of
ours; docs/tensor-parallel.md explains them to users. "Whole" means that all peers have the same, "split" that each has
a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import nn

from lightning_ptdp.tensor_parallel import cuts, fits, forwards, sequence
from lightning_ptdp.tensor_parallel.cuts import Cut
from lightning_ptdp.tensor_parallel.fits import Fit
from lightning_ptdp.tensor_parallel.peers import Peers
from lightning_ptdp.tensor_parallel.site import Forward, Site


class Maker(Protocol):
    """Makes the parallel forward of a module."""

    def __call__(self, module: nn.Module, forward: Forward, peers: Peers, site: Site) -> Forward | None:
        """The parallel forward, from the module's own; None where that is right."""


@dataclass(frozen=True)
class Style:
    """What a word of a plan means.

    cut: how it cuts a parameter of the module.
    forward: makes the parallel forward; None where the module's own is right for every module.
    fits: what it asks of a module, in order; of a module that fails, the first is told.
    old_name: another name for it that plans may use.

    What others ask of a style, in order of use:

    divides_attribute: it is for an integer attribute of a module, which is divided by the number of peers.
    sums_gradient: each peer has a part of the gradient of a whole weight, so these are summed.
    can_be_head: where its output is the vocabulary, logits stay split for the loss.
    splits_output, takes_split_input: between a layer of the one and a layer of the other activations are split, and
        random draws a peer's own.
    num_packed: how many projections to heads its output may hold, side by side; 0 where it holds none.
    is_of_sequence: it marks the norms that run on a part of the sequence under sequence parallelism.
    is_same_for_sequence: gradients of its weights are whole even in blocks that run on parts of the sequence.
    needs_no_parameters: its forward changes on modules without parameters too.
    """

    name: str
    cut: Cut = cuts.stays_whole
    forward: Maker | None = None
    fits: tuple[Fit, ...] = ()
    old_name: str = ""
    divides_attribute: bool = False
    sums_gradient: bool = False
    can_be_head: bool = False
    splits_output: bool = False
    takes_split_input: bool = False
    num_packed: int = 0
    is_of_sequence: bool = False
    is_same_for_sequence: bool = False
    needs_no_parameters: bool = False

    def misfit(self, module: nn.Module, site: Site) -> str | None:
        """What is wrong with giving the style to a module, in a sentence; None if nothing is."""
        return next((fault for fit in self.fits if (fault := fit(self.name, module, site))), None)


_LINEAR = (fits.holds_no_modules, fits.has_its_weight)
_EMBEDDING = (fits.is_embedding, fits.has_its_weight)

_ROWS = (
    # input whole, output split
    Style(
        "colwise",
        cuts.by_output,
        forwards.colwise,
        _LINEAR,
        can_be_head=True,
        splits_output=True,
        num_packed=1,
    ),
    # input whole, output joined again
    Style(
        "colwise_gather_output",
        cuts.by_output,
        forwards.colwise_gather_output,
        _LINEAR,
        old_name="colwise_rep",
        can_be_head=True,
    ),
    # input split, output summed; the bias is whole, and added once
    Style("rowwise", cuts.by_input, forwards.rowwise, (*_LINEAR, fits.is_plain_product), takes_split_input=True),
    # input whole, split first
    Style(
        "rowwise_split_input",
        cuts.by_input,
        partial(forwards.rowwise, splits_input=True),
        (*_LINEAR, fits.is_plain_product),
        old_name="rowwise_rep",
    ),
    # as colwise and rowwise, for gate and up in one matrix
    Style("packed_colwise", cuts.by_output_of_halves, forwards.colwise, splits_output=True),
    Style(
        "packed_rowwise", cuts.by_input_of_halves, forwards.rowwise, (fits.is_plain_product,), takes_split_input=True
    ),
    # as colwise, for query, key and value in one matrix
    Style("packed_qkv_colwise", cuts.by_heads_of_qkv, forwards.colwise, _LINEAR, splits_output=True, num_packed=3),
    # lookups of what a peer holds, summed
    Style("embedding_rowwise", cuts.by_vocabulary, forwards.embedding_rowwise, _EMBEDDING),
    # parts of every vector, joined
    Style("embedding_colwise", cuts.by_embedding_dim, forwards.embedding_colwise, _EMBEDDING),
    # hidden states and routing weights whole, output summed; the experts' parameters have styles of their own
    Style("moe_tp_experts", forward=forwards.moe_experts),
    # input divided by the number of peers, since outputs are summed
    Style("moe_identity_expert", forward=forwards.moe_identity_expert, needs_no_parameters=True),
    # whole; the gradient of the rotary part is summed
    Style("mla_kv_a_proj", forward=forwards.mla_kv_a_proj, fits=(fits.knows_rotary_width,)),
    # whole, and used on a peer's own heads
    Style("replicated_with_grad_allreduce", sums_gradient=True),
    # the module reads its bare parameters, which have styles of their own
    Style("local_params"),
    # output summed
    Style("all_reduce", forward=forwards.all_reduce, needs_no_parameters=True),
    # whole; used on a part of the sequence, where that is on
    Style("sequence_parallel", forward=sequence.norm, is_of_sequence=True),
    # whole, as it is
    Style("replicate", is_same_for_sequence=True),
    # an integer attribute, divided by the number of peers
    Style("local_size", divides_attribute=True),
)

STYLES: Mapping[str, Style] = {style.name: style for style in _ROWS}

_OLD_NAMES = {style.old_name: style for style in _ROWS if style.old_name}


def find_style(name: str) -> Style | None:
    """The style of a name in a plan, an old name or not; None for a word that is none."""
    return STYLES.get(name) or _OLD_NAMES.get(name)
