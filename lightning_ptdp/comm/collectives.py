"""Collectives by name, and the conjugate pairs whose backward is the other's forward.

A group of one rank returns its input; no other code asks for the size of a group to decide that. None of these writes
into a caller's tensor unless its name ends in an underscore.

    pair           forward              backward            (SC'21 section 2.3)
    copy_to        identity             all-reduce          operator f
    reduce_from    all-reduce           identity            operator g
    gather_from    all-gather a dim     own slice
    scatter_to     own slice of a dim   all-gather
    gather_to      all-gather a dim     reduce-scatter      f of sequence parallelism
    reduce_scatter_from  reduce-scatter  all-gather         g of sequence parallelism
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.in_process import rank_in

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX
MIN = dist.ReduceOp.MIN

# torch 2.13 renamed these two, and warns at every call of the old names.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce_(tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce in place over the group, and return the tensor."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def reduce_by_name(tensor: Tensor, group: ProcessGroup, op: str | dist.ReduceOp.RedOpType | None) -> Tensor:
    """Reduce over the group into a new tensor by "mean" (or "avg"), "sum", "min", "max", or an operation of torch's."""
    if isinstance(op, str) and op.lower() in ("mean", "avg"):
        total = all_reduce_(tensor.clone() if tensor.is_floating_point() else tensor.float(), group)
        return total / group.size()
    named = {"sum": SUM, "min": MIN, "max": MAX}
    if isinstance(op, str) and op.lower() not in named:
        raise ValueError(f"tensors are reduced by mean, sum, min or max; got {op!r}")
    chosen = named[op.lower()] if isinstance(op, str) else op if op is not None else SUM
    return all_reduce_(tensor.clone(), group, chosen)


def summed_copy(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the group, in a tensor of its own."""
    return all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group)


def average_gradients(parameters: Iterable[nn.Parameter], fresh: Set[nn.Parameter], group: ProcessGroup) -> None:
    """Average the ``.grad`` of parameters over the group; where only some ranks have one, the others count as zero.

    parameters: in an order that the ranks share. fresh: those to average; what is so on any rank is on all.
    """
    members = list(parameters)
    if group.size() == 1 or not members:
        return
    flags = torch.tensor([p in fresh and p.grad is not None for p in members], dtype=torch.int32)
    found = all_reduce_(flags, group, MAX).tolist()
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, is_fresh in zip(members, found, strict=True):
        if is_fresh:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_dtype.values():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
        flat = all_reduce_(torch.cat([g.reshape(-1) for g in gradients]), group).div_(group.size())
        for parameter, part in zip(alike, flat.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = part.view(parameter.shape)


def broadcast_(tensor: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """Overwrite in place with the tensor of global rank `source`, and return it."""
    if group.size() > 1:
        dist.broadcast(tensor, group_src=rank_in(group, source), group=group)
    return tensor


def broadcast_object(value: Any, source: int, group: ProcessGroup) -> Any:
    """The picklable object of global rank `source`, on every rank of the group."""
    if group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group_src=rank_in(group, source), group=group)
    return box[0]


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """One picklable object of every rank of the group, in group order, on every rank."""
    if group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def send_to(tensor: Tensor, destination: int) -> None:
    """Send a contiguous tensor to global rank `destination`, which calls `receive_from`; for rare, large transfers."""
    dist.send(tensor, dst=destination)


def receive_from(tensor: Tensor, source: int) -> None:
    """Overwrite a contiguous tensor with what global rank `source` sends."""
    dist.recv(tensor, src=source)


def barrier(group: ProcessGroup) -> None:
    """Wait until every rank of the group is here."""
    if group.size() > 1:
        dist.barrier(group=group)


def chunk_sizes(length: int, parts: int) -> list[int]:
    """Sizes of the pieces into which `torch.chunk` cuts, with empty pieces where it gives fewer."""
    step = -(-length // parts)
    return [max(0, min(step, length - i * step)) for i in range(parts)]


def own_chunk(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """A view of this rank's piece along `dim`, cut as `chunk_sizes` says."""
    sizes = chunk_sizes(tensor.shape[dim], group.size())
    return tensor.narrow(dim, sum(sizes[: group.rank()]), sizes[group.rank()])


def all_gather_dim(tensor: Tensor, group: ProcessGroup, dim: int, length: int) -> Tensor:
    """Join the pieces of all ranks along `dim` into `length`; pieces may differ in size as `chunk_sizes` says."""
    if group.size() == 1:
        return tensor
    sizes = chunk_sizes(length, group.size())
    moved = tensor.movedim(dim, 0).contiguous()
    if len(set(sizes)) == 1:
        whole = moved.new_empty((length, *moved.shape[1:]))
        _all_gather_single(whole, moved, group=group)
        return _moved_back(whole, dim)
    padded = moved.new_zeros((sizes[0], *moved.shape[1:]))
    padded[: len(moved)] = moved
    pieces = moved.new_empty((len(sizes), *padded.shape))
    _all_gather_single(pieces.flatten(0, 1), padded, group=group)
    return _moved_back(torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)]), dim)


def reduce_scatter_dim(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Sum over the group and keep this rank's piece along `dim`, which the group's size must divide."""
    if group.size() == 1:
        return tensor
    moved = tensor.movedim(dim, 0).contiguous()
    piece = moved.new_empty((len(moved) // group.size(), *moved.shape[1:]))
    _reduce_scatter_single(piece, moved, op=SUM, group=group)
    return _moved_back(piece, dim)


def reduce_scatter_slices_(flat: Tensor, group: ProcessGroup) -> None:
    """Sum a flat tensor over the group, in this rank's equal slice of it only; the rest is left as it was.

    The group's size must divide its length.
    """
    if group.size() == 1:
        return
    mine = own_chunk(flat, group, 0)
    summed = torch.empty_like(mine)
    _reduce_scatter_single(summed, flat, op=SUM, group=group)
    mine.copy_(summed)


def all_gather_slices_(flat: Tensor, group: ProcessGroup) -> None:
    """Fill a flat tensor with every rank's equal slice of it; the group's size must divide its length."""
    if group.size() == 1:
        return
    _all_gather_single(flat, own_chunk(flat, group, 0).clone(), group=group)


def _moved_back(tensor: Tensor, dim: int) -> Tensor:
    """Dim 0 put at `dim`, contiguous and no view: autograd forbids editing views that a custom function returns."""
    return tensor if dim % tensor.ndim == 0 else tensor.movedim(0, dim).contiguous()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed_copy(gradient, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return summed_copy(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int, length: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather_dim(tensor, group, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return own_chunk(gradient, ctx.group, ctx.dim).contiguous(), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, tensor.shape[dim]
        return own_chunk(tensor, group, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_dim(gradient, ctx.group, ctx.dim, ctx.length), None, None


class _GatherTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather_dim(tensor, group, dim, tensor.shape[dim] * group.size())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_dim(gradient, ctx.group, ctx.dim), None, None


class _GatheredTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter_dim(gradient, ctx.group, ctx.dim), None, None, None


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter_dim(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_dim(gradient, ctx.group, ctx.dim, gradient.shape[ctx.dim] * ctx.group.size()), None, None


def copy_to(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Hand a replicated tensor to split computation: identity, its gradient summed over the group."""
    return tensor if group.size() == 1 else _apply(_CopyTo, tensor, group)


def reduce_from(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum partial results over the group into a replicated tensor; its gradient passes unchanged."""
    return tensor if group.size() == 1 else _apply(_ReduceFrom, tensor, group)


def gather_from(tensor: Tensor, group: ProcessGroup, dim: int, length: int) -> Tensor:
    """Join pieces along `dim` into a replicated tensor of `length`; each rank's gradient is its own slice."""
    return tensor if group.size() == 1 else _apply(_GatherFrom, tensor, group, dim, length)


def scatter_to(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's piece along `dim` of a replicated tensor; the gradient is joined again."""
    return tensor if group.size() == 1 else _apply(_ScatterTo, tensor, group, dim)


def gather_to(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Join equal pieces along `dim` and hand them to split computation: the gradient is summed and scattered."""
    return tensor if group.size() == 1 else _apply(_GatherTo, tensor, group, dim)


def gathered_to(part: Tensor, whole: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """As `gather_to` of `part`, where the joined values are there already.

    whole: what all parts make, without a graph.
    """
    joined: Tensor = _apply(_GatheredTo, part, whole, group, dim)
    return joined


def reduce_scatter_from(tensor: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Sum partial results and keep this rank's piece along `dim`; the gradient is joined again."""
    return tensor if group.size() == 1 else _apply(_ReduceScatterFrom, tensor, group, dim)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # graphs of a compiler end here
def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result = function.apply(*args)
    assert isinstance(result, Tensor)
    return result


def gather_objects_to(value: Any, destination: int, group: ProcessGroup) -> list[Any] | None:
    """One picklable object of every rank of the group, in group order, on global rank `destination`; None elsewhere."""
    if group.size() == 1:
        return [value]
    values: list[Any] | None = [None] * group.size() if dist.get_rank() == destination else None
    dist.gather_object(value, values, dst=destination, group=group)
    return values
