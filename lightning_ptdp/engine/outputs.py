"""What a step returned for its microbatches, as if it had run once on the batch; and its way to other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ptdp.host.torch import pytree


def detached(value: Any) -> Any:
    """The same structure without graphs."""
    return _map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Scalars as floats on the host; tensors cross in float64, those of a device together."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(value.double())
    crossed = {device: iter(torch.stack(members).tolist()) for device, members in by_device.items()}
    return [next(crossed[value.device]) if isinstance(value, Tensor) else float(value) for value in values]


@dataclasses.dataclass(frozen=True, slots=True)
class _OnDevice:
    """A tensor of an accelerator, on the host."""

    tensor: Tensor


def packed(value: Any) -> Any:
    """The same structure, ready to be sent: pickled tensors would go to the sender's device."""
    return _map(
        lambda leaf: _OnDevice(leaf.cpu()) if isinstance(leaf, Tensor) and leaf.device.type != "cpu" else leaf, value
    )


def unpacked(value: Any, device: torch.device) -> Any:
    """The structure that was `packed`, what was on an accelerator on this rank's."""
    return _map(lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _OnDevice) else leaf, value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves, those in dataclasses too."""

    def apply(leaf: Any) -> Any:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | _OnDevice):
            changes = {f.name: _map(function, getattr(leaf, f.name)) for f in dataclasses.fields(leaf) if f.init}
            return dataclasses.replace(leaf, **changes)
        return function(leaf)

    return pytree.tree_map(apply, value)


def extras(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> dict[str, Any]:
    """What dicts that a training step returned hold besides "loss", merged over the microbatches that are not None."""
    kept = [row for row in zip(outputs, sizes, weights, strict=False) if row[0] is not None]
    if not kept or not all(isinstance(output, Mapping) for output, _, _ in kept):
        return {}
    outputs, sizes, weights = zip(*kept, strict=True)
    names = [name for name in outputs[0] if name != "loss"]
    return {name: merge([output.get(name) for output in outputs], sizes, weights) for name in names}


def merge(values: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """One value for those of the microbatches.

    sizes: rows. weights: what each counts in a mean.

    Structures are merged leaf by leaf. Tensors, arrays and lists with an entry a row are joined. Floats and scalar
    tensors are averaged by weight, whole numbers summed (Python's stay as they are where all are equal, unless they
    count the rows), equal strings stay as they are. Anything else becomes a list with an entry a microbatch.
    """
    if not values:
        return None
    if len(values) == 1:
        return detached(values[0])
    flat, specs = zip(
        *(
            pytree.tree_flatten(detached(value), is_leaf=partial(_is_column, size=size))
            for value, size in zip(values, sizes, strict=True)
        ),
        strict=True,
    )
    if len(set(map(str, specs))) > 1:
        return [detached(value) for value in values]
    leaves = [_merge_leaves(group, sizes, weights) for group in zip(*flat, strict=True)]
    return pytree.tree_unflatten(leaves, specs[0])


def _is_column(value: Any, size: int) -> bool:
    """Whether a list has an entry a row: entries of one kind that have no rows of their own."""
    return (
        isinstance(value, list)
        and len(value) == size
        and len(set(map(type, value))) == 1
        and not any(_has_rows(item, size) for item in value)
    )


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0 and len(leaf) == size


def _merge_leaves(leaves: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    have_rows = all(_has_rows(leaf, size) for leaf, size in zip(leaves, sizes, strict=True))
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return torch.cat(list(leaves)) if have_rows else _merge_tensors(leaves, weights)
    if have_rows:
        return np.concatenate(leaves)
    if all(_is_column(leaf, size) for leaf, size in zip(leaves, sizes, strict=True)):
        return [entry for leaf in leaves for entry in leaf]
    if all(isinstance(leaf, str | int | float | None) for leaf in leaves):
        return _merge_plain(leaves, sizes, weights)
    return list(leaves)


def _merge_plain(leaves: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    are_whole = all(type(leaf) is int for leaf in leaves)
    are_same = all(leaf == leaves[0] for leaf in leaves)
    if are_whole and (not are_same or list(leaves) == list(sizes)):
        return sum(leaves)
    if are_same or not all(isinstance(leaf, int | float) for leaf in leaves):
        return leaves[0] if are_same else list(leaves)
    total = sum(weights) or 1.0
    return sum(leaf * weight for leaf, weight in zip(leaves, weights, strict=True)) / total


def _merge_tensors(tensors: Sequence[Tensor], weights: Sequence[float]) -> Any:
    if any(t.ndim for t in tensors):
        return list(tensors)
    joined = torch.stack(list(tensors))
    if not joined.is_floating_point():
        return joined.sum()
    total = sum(weights) or 1.0
    return (joined * torch.tensor([w / total for w in weights], dtype=joined.dtype, device=joined.device)).sum()
