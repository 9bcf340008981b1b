"""Linear layers, of the two kinds that there are: `nn.Linear`, and those that keep their weight transposed."""

from __future__ import annotations

from torch import nn


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as [in, out], as GPT-2's Conv1D does."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Conv1d)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, of either kind."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def num_outputs(module: nn.Module) -> int | None:
    """How many outputs a whole linear layer has; None if it is no linear layer."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.get_parameter("weight").shape[1] if is_transposed(module) else None
