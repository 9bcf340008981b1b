"""Logits that stay split over the vocabulary behind what looks like a tensor.

`SplitLogits` has the shape of the whole logits and holds only the rank's classes. Operations that leave the vocabulary
alone (casts, views, slices of leading dims, elementwise with scalars, transposes) give `SplitLogits` again;
`F.cross_entropy` runs on the shards; anything else first joins them, and is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from lightning_ptdp.comm.collectives import chunk_sizes, gather_from
from lightning_ptdp.host.torch import pytree, without_torch_function
from lightning_ptdp.kernels.cross_entropy import cross_entropy
from lightning_ptdp.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy

_METHODS: Any = torch.Tensor

# Give the same result on the shard; other arguments may be numbers only.
_ELEMENTWISE = {
    *(_METHODS.to, _METHODS.float, _METHODS.double, _METHODS.half, _METHODS.bfloat16, _METHODS.type),
    *(_METHODS.contiguous, _METHODS.clone, torch.clone, _METHODS.detach, torch.detach, _METHODS.cpu, _METHODS.cuda),
    *(torch.add, _METHODS.add, _METHODS.__add__, _METHODS.__radd__),
    *(torch.sub, _METHODS.sub, _METHODS.__sub__, _METHODS.__rsub__),
    *(torch.mul, _METHODS.mul, _METHODS.__mul__, _METHODS.__rmul__),
    *(torch.div, _METHODS.div, _METHODS.__truediv__, torch.true_divide, _METHODS.true_divide),
    *(torch.neg, _METHODS.neg, _METHODS.__neg__, torch.tanh, _METHODS.tanh),
    *(torch.clamp, _METHODS.clamp, torch.exp, _METHODS.exp, torch.sigmoid, _METHODS.sigmoid),
    *(torch.nan_to_num, _METHODS.nan_to_num, torch.abs, _METHODS.abs, torch.pow, _METHODS.pow, _METHODS.__pow__),
}
_RESHAPES = {
    *(_METHODS.view, _METHODS.reshape, torch.reshape, _METHODS.flatten, torch.flatten),
    *(_METHODS.unflatten, torch.unflatten, _METHODS.unsqueeze, torch.unsqueeze, _METHODS.squeeze, torch.squeeze),
}
_PERMUTATIONS = {
    *(_METHODS.transpose, torch.transpose, _METHODS.permute, torch.permute, _METHODS.movedim, torch.movedim),
    *(_METHODS.swapaxes, torch.swapaxes, _METHODS.swapdims, torch.swapdims, _METHODS.mT.__get__, _METHODS.t, torch.t),
}
_METADATA = {
    *(_METHODS.shape.__get__, _METHODS.dtype.__get__, _METHODS.device.__get__, _METHODS.ndim.__get__),
    *(_METHODS.layout.__get__, _METHODS.is_cuda.__get__, _METHODS.is_meta.__get__, _METHODS.is_sparse.__get__),
    *(_METHODS.size, _METHODS.dim, _METHODS.numel, torch.numel, _METHODS.nelement, _METHODS.ndimension),
    *(_METHODS.is_floating_point, torch.is_floating_point, _METHODS.is_complex, torch.is_complex),
    *(_METHODS.__len__, _METHODS.element_size, _METHODS.get_device, _METHODS.itemsize.__get__),
}
_OF_THE_SHARD = {_METHODS.requires_grad.__get__, _METHODS.grad_fn.__get__, _METHODS.is_leaf.__get__}


class SplitLogits(Tensor):
    """The whole logits' shape; the rank's classes in `shard`, along dim `vocabulary_dim`."""

    shard: Tensor
    group: ProcessGroup
    vocabulary_dim: int
    joined: Tensor | None
    is_edited: bool
    source: SplitLogits | None
    derive: Callable[[Tensor], Tensor] | None

    @staticmethod
    def make(shard: Tensor, group: ProcessGroup, vocabulary_dim: int, vocabulary: int) -> SplitLogits:
        """Wrap a rank's classes.

        shard: any shape, with this rank's classes along `vocabulary_dim`. vocabulary: classes of all ranks.
        """
        shape = list(shard.shape)
        shape[vocabulary_dim] = vocabulary
        outline = torch.full((), float("nan"), dtype=shard.dtype, device=shard.device).expand(shape)
        made = outline.as_subclass(SplitLogits)
        made.shard, made.group = shard, group
        made.joined, made.is_edited = None, False
        made.source = made.derive = None
        made.vocabulary_dim = vocabulary_dim % shard.ndim
        return made

    @property
    def vocabulary(self) -> int:
        """Classes of all ranks."""
        return _outline(self).shape[self.vocabulary_dim]

    def join(self) -> Tensor:
        """The whole logits; every peer must call it."""
        if self.joined is None and self.source is not None and self.derive is not None and self.source.was_edited:
            self.joined = self.derive(self.source.join())
        if self.joined is None:
            self.joined = gather_from(self.shard, self.group, self.vocabulary_dim, self.vocabulary)
        return self.joined

    @property
    def was_edited(self) -> bool:
        """Whether the shard is out of date: these logits, or those that they are a view of, were written into."""
        return self.is_edited or (self.source is not None and self.source.was_edited)

    def _join_to_edit(self) -> Tensor:
        """The whole logits, from now on the only ones; of a view, a view of its source's."""
        if self.source is not None and self.derive is not None:
            self.joined = self.derive(self.source._join_to_edit())
        self.is_edited = True
        return self.join()

    def _like(self, shard: Tensor, vocabulary_dim: int | None = None) -> SplitLogits:
        dim = self.vocabulary_dim if vocabulary_dim is None else vocabulary_dim
        return SplitLogits.make(shard, self.group, dim, self.vocabulary)

    def _view(self, shard: Tensor, vocabulary_dim: int, derive: Callable[[Tensor], Tensor]) -> SplitLogits:
        """A view of these logits. derive: makes it of the joined ones."""
        view = self._like(shard, vocabulary_dim)
        view.source, view.derive = self, derive
        return view

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` on the shards where that is the same, else on the joined logits."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in (_METHODS.__repr__, _METHODS.__format__):
            return f"SplitLogits(shape={tuple(_outline(args[0]).shape)}, vocabulary_dim={args[0].vocabulary_dim})"
        if isinstance(first, SplitLogits) and not first.was_edited:
            result = first._on_shard(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if isinstance(kwargs.get("input"), SplitLogits) and func is F.cross_entropy and not args:
            return cls.__torch_function__(func, types, (kwargs.pop("input"),), kwargs)
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        edited = first if isinstance(first, SplitLogits) and _edits(func) else None
        if edited is not None:
            edited._join_to_edit()
        joined_args, joined_kwargs = pytree.tree_map(
            lambda leaf: leaf.join() if isinstance(leaf, SplitLogits) else leaf, (args, kwargs)
        )
        result = func(*joined_args, **joined_kwargs)
        return edited if edited is not None and result is edited.joined else result

    def _on_shard(  # noqa: PLR0911  one return a kind of operation
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result from the shard; NotImplemented where that would not be the same."""
        others = (*args[1:], *kwargs.values())
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _OF_THE_SHARD:
            return func(self.shard, *args[1:], **kwargs)
        if func in _ELEMENTWISE and not any(_is_array(other) for other in others):
            return self._elementwise(func, args, kwargs)
        if func in _PERMUTATIONS:
            return self._permuted(func, args[1:], kwargs)
        if func in _RESHAPES:
            return self._reshaped(func, args, kwargs)
        if func is _METHODS.__getitem__:
            return self._indexed(args[1])
        if func is F.cross_entropy or func is cross_entropy:
            return self._cross_entropy(*args[1:], **kwargs)
        return NotImplemented

    def _elementwise(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitLogits:
        result = func(self.shard, *args[1:], **kwargs)
        if result is self.shard:  # a cast to the dtype that it has
            return self._view(result, self.vocabulary_dim, lambda joined: joined)
        return self._like(result)

    def _permuted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitLogits:
        labels = torch.empty(tuple(range(1, self.shard.ndim + 1)), device="meta")
        moved = func(labels, *args, **kwargs).shape.index(self.vocabulary_dim + 1)
        return self._view(func(self.shard, *args, **kwargs), moved, lambda joined: func(joined, *args, **kwargs))

    def _reshaped(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Views that leave the last dim, the vocabulary, alone."""
        if self.vocabulary_dim != self.shard.ndim - 1:
            return NotImplemented
        with without_torch_function():
            shape = func(torch.empty(self.shape, device="meta"), *args[1:], **kwargs).shape
        if not shape or shape[-1] != self.vocabulary:
            return NotImplemented
        reshaped = self.shard.reshape(*shape[:-1], self.shard.shape[-1])
        return self._view(reshaped, len(shape) - 1, lambda joined: func(joined, *args[1:], **kwargs))

    def _indexed(self, index: Any) -> Any:
        """Indices of the leading dims, where the vocabulary is the last dim and is taken whole."""
        if self.vocabulary_dim != self.shard.ndim - 1:
            return NotImplemented
        items = list(index) if isinstance(index, tuple) else [index]
        taken = sum(_dims_taken(item) for item in items)
        if any(item is Ellipsis for item in items):
            place = next(i for i, item in enumerate(items) if item is Ellipsis)
            items[place : place + 1] = [slice(None)] * (self.shard.ndim - taken)
            taken = self.shard.ndim
        if taken >= self.shard.ndim and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
            return NotImplemented
        if any(isinstance(item, SplitLogits) for item in items):
            return NotImplemented
        picked = self.shard[tuple(items)]
        return self._view(picked, picked.ndim - 1, lambda joined: joined[index])

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        class_dim = 1 if self.shard.ndim > 1 else 0
        if (
            weight is not None
            or size_average is not None
            or reduce is not None
            or target.is_floating_point()
            or self.vocabulary_dim != class_dim
        ):
            return NotImplemented
        rows = self.shard.movedim(class_dim, -1)
        losses = vocabulary_parallel_cross_entropy(
            rows.reshape(-1, rows.shape[-1]),
            target.reshape(-1),
            self.group,
            first=sum(chunk_sizes(self.vocabulary, self.group.size())[: self.group.rank()]),
            vocabulary=self.vocabulary,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return losses.view(target.shape) if reduction == "none" else losses


def join_all(value: Any) -> Any:
    """The same structure with every `SplitLogits` joined and detached; every peer must call it."""

    def join(leaf: Any) -> Any:
        return leaf.join().detach() if isinstance(leaf, SplitLogits) else leaf

    return pytree.tree_map(join, value)


def _edits(func: Callable[..., Any]) -> bool:
    """Whether an operation writes into its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__invert__", "__int__"))
    return name.endswith("_")


def _outline(logits: SplitLogits) -> Tensor:
    with without_torch_function():
        return logits.as_subclass(Tensor)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and (isinstance(value, SplitLogits) or value.ndim > 0)


def _dims_taken(item: Any) -> int:
    """Dims of the input that one index uses up."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.ndim
    return 1
