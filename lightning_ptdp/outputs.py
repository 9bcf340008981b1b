"""What a step returned for its microbatches, as if it had run once on the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def detached(value: Any) -> Any:
    """The same structure without graphs."""
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def to_device(value: Any, device: torch.device) -> Any:
    """The same structure with its tensors on a device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


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

    Tensors with a row a sample are joined, numbers and scalar tensors averaged by weight ("weight" and other integers
    summed), structures merged leaf by leaf; anything else stays a list.
    """
    if not values:
        return None
    if len(values) == 1:
        return detached(values[0])
    flat, specs = zip(*(pytree.tree_flatten(detached(value)) for value in values), strict=True)
    if len(set(map(str, specs))) > 1:
        return [detached(value) for value in values]
    leaves = [_merge_leaves(group, sizes, weights) for group in zip(*flat, strict=True)]
    return pytree.tree_unflatten(leaves, specs[0])


def _merge_leaves(leaves: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) == len(leaves):
        return _merge_tensors(tensors, sizes, weights)
    if all(leaf == leaves[0] for leaf in leaves):
        return leaves[0]
    if all(isinstance(leaf, int | float) for leaf in leaves):
        total = sum(weights) or 1.0
        return sum(leaf * weight for leaf, weight in zip(leaves, weights, strict=True)) / total
    return list(leaves)


def _merge_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    if all(t.ndim and len(t) == size for t, size in zip(tensors, sizes, strict=True)):
        return torch.cat(list(tensors))
    if any(t.ndim for t in tensors):
        return list(tensors)
    joined = torch.stack(list(tensors))
    if not joined.is_floating_point():
        return joined.sum()
    total = sum(weights) or 1.0
    return (joined * torch.tensor([w / total for w in weights], dtype=joined.dtype, device=joined.device)).sum()
