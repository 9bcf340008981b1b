"""PyTorch's private names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import OpOverload as OpOverload  # noqa: PLC0414  # given on by this file, for annotations of what a TorchDispatchMode is given
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils.data import DataLoader

pytree = _pytree
"""Takes nested containers apart and builds them again. Modules that PyTorch and Lightning ship go through this registry
of containers (transformers adds its outputs to it), and it has no public name."""

TorchDispatchMode = _TorchDispatchMode
"""Sees each operation below autograd. PyTorch's notes on extending it teach it, under this underscored module."""

FakeTensorMode = _FakeTensorMode
"""Within, `torch.load` reads no values and notes where they lie in the file; map_location="meta" notes nothing."""

BatchNorm = nn.modules.batchnorm._BatchNorm
"""What every batch norm derives from, lazy and synchronised ones and a user's; public are only the derived ones."""

BatchOrInstanceNorm = nn.modules.batchnorm._NormBase
"""What everything with running statistics derives from: batch norm and instance norm have no public base."""


def schema_of(func: OpOverload[..., Any]) -> torch.FunctionSchema:
    """The names, aliases and edits of an operation's arguments; nothing public tells them apart."""
    return func._schema


def version_of(tensor: Tensor) -> int:
    """How often a tensor was edited in place; autograd's own count, which nothing public tells.

    Raises:
        RuntimeError: an inference tensor, which keeps no count.
    """
    return tensor._version


def without_torch_function() -> AbstractContextManager[None]:
    """Within, a Tensor subclass is a plain tensor to PyTorch. `Tensor.__torch_function__` uses it, under this name."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s that are entered, the outermost first; PyTorch tells nobody else."""
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()
    return modes


# -- modules -----------------------------------------------------------------------------------------------------------

TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
"""The function of `torch.nn.init` that `trunc_normal_` calls, under whatever name a user imported that."""

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold what is registered."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters: the registry itself, in which one can be taken out and put back in another order.

    `named_parameters` leaves out None and repeats, and `register_parameter` always adds at the end.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers: the registry itself. `register_buffer` would change which of them are saved."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's own children: the registry itself. `named_children` names a child once that is there twice."""
    return module._modules


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` made, which `module(...)` runs instead of the forward; nothing public tells."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `module(...)` run this in place of what `module.compile()` made."""
    module._compiled_call_impl = call


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made it, or compiled it in place; `torch.compiler` asks about the running code only."""
    return isinstance(module, torch._dynamo.OptimizedModule) or compiled_call_of(module) is not None


# -- files and loaders -------------------------------------------------------------------------------------------------


def offset_in_file(storage: UntypedStorage) -> int | None:
    """The byte at which a storage's values begin in the file that it was loaded from, under a `FakeTensorMode`.

    Nothing public tells; it lets values be written and read without holding a second copy of them.
    """
    offset: int | None = storage._checkpoint_offset
    return offset


def slice_of(reader: Any, stream: Any, stored: Any) -> Any:
    """The part of a stream that holds one stored tensor, as DCP's `FileSystemReader` cuts it: the file's format.

    Args:
        reader: the `FileSystemReader`.
        stream: an opened file of the checkpoint.
        stored: the reader's `storage_data` of the tensor.
    """
    return reader._slice_file(stream, stored)


def may_keep_iterator(loader: DataLoader[Any]) -> bool:
    """Whether a loader is one that may keep its iterator; see `kept_iterator`."""
    return hasattr(loader, "_iterator")


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """The iterator that a loader with persistent workers keeps between epochs; Lightning ends its workers by it."""
    return getattr(loader, "_iterator", None)


def set_kept_iterator(loader: DataLoader[Any], iterator: Any) -> None:
    """Let a loader keep another iterator; None makes the next epoch begin with new workers."""
    loader._iterator = iterator
