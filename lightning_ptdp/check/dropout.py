"""Turns dropout off: ranks draw other masks than one process does, so that no comparison would hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_ptdp.kernels import bias_dropout_add

# Where each operation has its probability: the index among its arguments, and the name.
_PROBABILITIES: dict[Callable[..., Any], tuple[int, str]] = {
    F.dropout: (1, "p"),
    F.dropout1d: (1, "p"),
    F.dropout2d: (1, "p"),
    F.dropout3d: (1, "p"),
    F.alpha_dropout: (1, "p"),
    F.feature_alpha_dropout: (1, "p"),
    torch.dropout: (1, "p"),
    torch.native_dropout: (1, "p"),
    bias_dropout_add: (3, "p"),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
}


class NoDropout(TorchFunctionMode):
    """A context within which operations of the calling thread drop nothing; modules stay in training mode.

    has_dropped: whether an operation was called that would have dropped something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_dropped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PROBABILITIES:
            index, name = _PROBABILITIES[func]
            given = args[index] if len(args) > index else kwargs.get(name, 0.0)
            self.has_dropped |= bool(given)
            if len(args) > index:
                args = (*args[:index], 0.0, *args[index + 1 :])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)


def without_recurrent_dropout(module: nn.Module) -> None:
    """Turn off the dropout between the layers of recurrent modules, which is no operation of its own."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.dropout = 0.0
