"""What a style asks of the module that it is given to: each check returns what is wrong, in a sentence, or None."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_ptdp.names import starred
from lightning_ptdp.tensor_parallel.forwards import rotary_width
from lightning_ptdp.tensor_parallel.site import Site

Fit = Callable[[str, nn.Module, Site], str | None]
"""Takes the style's name, the module, and where that stands."""


def is_embedding(style: str, module: nn.Module, site: Site) -> str | None:
    """It looks up rows."""
    if isinstance(module, nn.Embedding):
        return None
    return f"style {style!r} is for nn.Embedding, and {site.path!r} is a {_kind(module)}"


def holds_no_modules(style: str, module: nn.Module, site: Site) -> str | None:
    """It is a layer, not a block of them."""
    if not any(True for _ in module.children()):
        return None
    return (
        f"style {style!r} is for linear layers, and {site.path!r} ({_kind(module)}) holds modules of its own; name "
        "those instead"
    )


def has_its_weight(style: str, module: nn.Module, site: Site) -> str | None:
    """Its weight is a parameter, which can be cut, and not made of others."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if not own or "weight" in own:
        return None
    return (
        f"style {style!r} cuts the weight of {site.path!r} ({_kind(module)}), which is worked out from other "
        f"parameters ({', '.join(sorted(own))}); remove its weight norm or spectral norm, or leave "
        f"{starred(site.path)!r} out of the plan"
    )


def is_plain_product(style: str, module: nn.Module, site: Site) -> str | None:
    """A linear layer does nothing besides its product, which is done in its place."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return None
    return (
        f"style {style!r} runs the plain product of nn.Linear, and {site.path!r} ({_kind(module)}) has a forward of "
        "its own, which would be passed over; leave it out of the plan"
    )


def knows_rotary_width(style: str, module: nn.Module, site: Site) -> str | None:  # noqa: ARG001
    """A module around it says how many of its outputs are rotary."""
    if rotary_width(site) is not None:
        return None
    return (
        f"style {style!r} needs to know how many outputs of {site.path!r} are rotary, and no module around it has "
        "qk_rope_head_dim, or config.qk_rope_head_dim; leave it out of the plan"
    )


def _kind(module: nn.Module) -> str:
    return type(module).__name__
