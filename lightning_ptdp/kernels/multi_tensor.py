"""Lists of tensors in one pass: Adam, scaling, norms. The tensors of a call lie on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from lightning_ptdp.kernels import reference
from lightning_ptdp.kernels.library import OPERATIONS, LibraryOp, is_compiled
from lightning_ptdp.kernels.reference import AdamStep

CHUNK = 65536  # elements; kChunk of csrc/api.h


def adam_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    numbers: AdamStep,
    *,
    copies: Sequence[Tensor] = (),
    found_inf: Tensor | None = None,
) -> None:
    """One step of Adam or AdamW on a list of tensors, in place.

    Args:
        weights, first_moments, second_moments: float32.
        grads: of the weights' shapes, of any floating dtype.
        copies: 16-bit tensors that get the weights' values, one a weight, or none.
        found_inf: one float32 on the device. If it's nonzero nothing is done; it's set to 1 if a scaled gradient isn't
            finite, and then nothing is written either. None: gradients aren't checked.

    Raises:
        ValueError: lists differ in length, or tensors in shape.
    """
    if not weights:
        return
    checks = found_inf is not None
    flag = found_inf if found_inf is not None else torch.zeros(1, device=weights[0].device)
    if is_compiled(weights[0].device.type, torch.float32) and torch.ops.ptdp.adam_(
        list(weights),
        list(grads),
        list(first_moments),
        list(second_moments),
        list(copies),
        flag,
        numbers.lr,
        *numbers.betas,
        numbers.eps,
        numbers.weight_decay,
        numbers.step,
        numbers.decoupled,
        numbers.corrects_bias,
        numbers.grad_scale,
        checks,
    ):
        _mark_written(weights, first_moments, second_moments, copies)
        return
    _check_partners(weights, grads, first_moments, second_moments, *([copies] if copies else []))
    reference.adam_(weights, grads, first_moments, second_moments, numbers, copies=copies, found_inf=found_inf)


def scale_(inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float, found_inf: Tensor) -> None:
    """outputs[i] = factor * inputs[i]; found_inf (one float32) becomes 1 if a product isn't finite.

    Input and output may be one tensor, and their dtypes may differ.

    Raises:
        ValueError: lists differ in length, or tensors in shape.
    """
    if not inputs:
        return
    _check_partners(inputs, outputs)
    if _are_compiled(inputs, outputs):
        torch.ops.ptdp.scale_(list(inputs), list(outputs), found_inf, factor)
        _mark_written(outputs)
    else:
        reference.scale_(inputs, outputs, factor, found_inf)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all elements of the tensors, a float64 scalar (float32 where a device has no float64).

    Raises:
        ValueError: the list is empty.
    """
    _check_not_empty(tensors)
    if not _are_compiled(tensors):
        return reference.sum_of_squares(tensors)
    squares: Tensor = torch.ops.ptdp.squares(list(tensors))
    return squares.sum()


def l2_norms(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The L2 norm of all elements, a scalar, and that of each tensor, [n]: float32, summed in wider numbers.

    Raises:
        ValueError: the list is empty.
    """
    _check_not_empty(tensors)
    if not _are_compiled(tensors):
        return reference.l2_norms(tensors)
    counts = [-(-tensor.numel() // CHUNK) for tensor in tensors]
    squares: Tensor = torch.ops.ptdp.squares(list(tensors))
    owners = torch.arange(len(tensors)).repeat_interleave(torch.tensor(counts)).to(squares.device)
    of_each = squares.new_zeros(len(tensors)).index_add_(0, owners, squares)
    return squares.sum().sqrt().float(), of_each.sqrt().float()


def count_(counters: Sequence[Tensor]) -> list[float]:
    """Add 1 to each counter, a floating scalar on any device, and return what they are then."""
    if is_compiled("cpu", torch.float32):
        counts: list[float] = torch.ops.ptdp.count_(list(counters)).tolist()
        if counts:
            _mark_written(counters)
            return counts
    return reference.count_(counters)


def accumulate_weight_gradient(main_grad: Tensor, grad_output: Tensor, x: Tensor) -> None:
    """main_grad += grad_output^T x, in main_grad's dtype.

    On CUDA one matrix product of 16-bit numbers that adds in float32; elsewhere a 16-bit operand is widened first.

    Args:
        main_grad: [h_out, h_in], float32 for example; changed.
        grad_output: [..., h_out]. x: [..., h_in].
    """
    rows_out, rows_in = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
    if main_grad.dtype == rows_in.dtype == rows_out.dtype:
        main_grad.addmm_(rows_out.t(), rows_in)
    elif main_grad.is_cuda and main_grad.dtype == torch.float32 and rows_in.dtype == rows_out.dtype:
        torch.addmm(main_grad, rows_out.t(), rows_in, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.addmm_(rows_out.t().to(main_grad.dtype), rows_in.to(main_grad.dtype))


def _check_not_empty(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("a norm is of at least one tensor; got an empty list")


# A model may have thousands of tensors, so what asks each of them something is `map`.


def _check_partners(first: Sequence[Tensor], *others: Sequence[Tensor]) -> None:
    sizes = list(map(Tensor.numel, first))
    for other in others:
        if sizes != list(map(Tensor.numel, other)):
            raise ValueError(
                "lists of tensors go together element by element; got shapes "
                f"{[tuple(tensor.shape) for tensor in first]} and {[tuple(tensor.shape) for tensor in other]}"
            )


def _mark_written(*lists: Sequence[Tensor]) -> None:
    """Tell autograd, so that a graph that needs the old values raises."""
    torch.autograd.graph.increment_version(chain(*lists))


def _are_compiled(*lists: Sequence[Tensor]) -> bool:
    device = lists[0][0].device.type
    return all(is_compiled(device, dtype) for dtype in _dtypes(*lists)) and all(
        map(Tensor.is_contiguous, chain(*lists))
    )


def _dtypes(*lists: Iterable[Tensor]) -> set[torch.dtype]:
    return set(map(attrgetter("dtype"), chain(*lists)))


OPERATIONS.extend(
    (
        LibraryOp("count_", lambda counters: torch.empty(len(counters), dtype=torch.float64), has_gradient=False),
        LibraryOp("adam_", lambda *args: torch.zeros((), dtype=torch.bool), has_gradient=False),
        LibraryOp("scale_", lambda *args: None, has_gradient=False),
        LibraryOp(
            "squares",
            lambda tensors: tensors[0].new_empty(sum(-(-t.numel() // CHUNK) for t in tensors), dtype=torch.float64),
        ),
    )
)
