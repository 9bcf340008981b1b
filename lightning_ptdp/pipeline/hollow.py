"""Hollow modules: what stands in a rank's tree for what another rank owns.

A hollow parameter keeps its name, shape and dtype and costs one element: its values are NaN with stride 0, so that
reading ``weight.dtype`` works and any real use turns the loss into NaN instead of a silently wrong number. A hollow
module before the blocks answers calls through its *twin*, a copy on the meta device that only knows shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.host.torch import buffers_of, parameters_of, pytree


def nan_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype that holds one NaN (or zero, for integers) with stride 0."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


class HollowParameters:
    """The parameters and buffers of a tree that this rank does not own.

    They stay registered while optimizers are configured (so that `module.parameters()` is complete, in the plain
    module's order), and are plain attributes otherwise (so that nothing saves, moves or sums them).
    """

    def __init__(self, module: nn.Module, names: Iterable[str], device: torch.device) -> None:
        """Replace the values of `names`, full names of parameters and buffers, and unregister them."""
        self._leaves: list[tuple[nn.Module, str, nn.Parameter | Tensor]] = []
        self._orders: dict[nn.Module, list[str]] = {}
        values: dict[int, Tensor] = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            holder = module.get_submodule(path)
            tensor = parameters_of(holder).get(leaf, buffers_of(holder).get(leaf))
            assert tensor is not None, f"{name} is a parameter or buffer"
            if isinstance(tensor, nn.Parameter):
                value = values.setdefault(id(tensor), nan_like(tensor, device))
                tensor.data = value
                self._leaves.append((holder, leaf, tensor))
            else:
                self._leaves.append((holder, leaf, nan_like(tensor, device)))
            self._orders.setdefault(holder, list(parameters_of(holder)))
        self.unregister()

    @property
    def parameters(self) -> frozenset[nn.Parameter]:
        """The hollow parameters."""
        return frozenset(tensor for _, _, tensor in self._leaves if isinstance(tensor, nn.Parameter))

    def unregister(self) -> None:
        """Turn the hollow tensors into plain attributes."""
        for holder, leaf, tensor in self._leaves:
            parameters_of(holder).pop(leaf, None)
            buffers_of(holder).pop(leaf, None)
            holder.__dict__[leaf] = tensor.data if isinstance(tensor, nn.Parameter) else tensor

    def register(self) -> None:
        """Make them parameters again, in the plain module's order; buffers stay attributes."""
        for holder, leaf, tensor in self._leaves:
            if isinstance(tensor, nn.Parameter):
                holder.__dict__.pop(leaf, None)
                parameters_of(holder)[leaf] = tensor
        for holder, order in self._orders.items():
            for leaf in order:
                if leaf in parameters_of(holder):
                    parameters_of(holder)[leaf] = parameters_of(holder).pop(leaf)


class ShapeTwin:
    """A module's copy on the meta device: answers what a call returns in shapes, filled with NaN.

    Answers are cached by the shapes of the inputs.
    """

    def __init__(self, module: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        for buffer in module.buffers():
            memo[id(buffer)] = buffer.to("meta")
        self._module = copy.deepcopy(module, memo)
        self._cache: dict[Any, tuple[list[Any], pytree.TreeSpec]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes are no work for a compiler
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module would return, with the values left out; tensors are on the device of the first input."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        key = _signature(leaves, spec)
        found = self._cache.get(key) if key is not None else None
        if found is None:
            found = self._run(leaves, spec)
            if key is not None:
                self._cache[key] = found
        outputs, out_spec = found
        return pytree.tree_unflatten([_filled(leaf, device) for leaf in outputs], out_spec)

    def _run(self, leaves: list[Any], spec: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
        on_meta = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(on_meta, spec)
        self._module.train(False)
        with torch.no_grad():
            return pytree.tree_flatten(self._module(*args, **kwargs))


def _filled(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    value = float("nan") if leaf.is_floating_point() or leaf.is_complex() else 0
    return torch.full(leaf.shape, value, dtype=leaf.dtype, device=device)


def _signature(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """A hashable description of a call's inputs; None where a leaf cannot be hashed."""
    parts = tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves
    )
    try:
        hash(parts)
    except TypeError:
        return None
    return parts, spec
