"""Reads a tensor that `torch.save` wrote into the memory where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_ptdp.host.torch import FakeTensorMode, offset_in_file

_LARGE = 1 << 20  # for at least so many bytes it pays to look where the values lie


def read_tensor(stream: BinaryIO, offsets: Sequence[int], target: Tensor) -> None:
    """Read the part of a stored tensor that begins at `offsets` and has the target's size.

    If the part is consecutive in the file, and the target contiguous on the host, values are read straight into it. In
    all other cases the whole stored tensor is read, and its part copied.

    Args:
        stream: from the tensor's first byte to its last.
        offsets: index of the part's first element in the stored tensor.
        target: filled.
    """
    if target.nbytes < _LARGE or not _is_direct(target) or not _read_directly(stream, offsets, target):
        stream.seek(0)
        stored = torch.load(stream, map_location="cpu", weights_only=True)
        for dim, (start, length) in enumerate(zip(offsets, target.shape, strict=True)):
            stored = stored.narrow(dim, start, length)
        target.copy_(stored)


def _is_direct(target: Tensor) -> bool:
    return (
        target.dim() > 0
        and target.device.type == "cpu"
        and target.is_contiguous()
        and type(target) in (Tensor, torch.nn.Parameter)
    )


def _read_directly(stream: BinaryIO, offsets: Sequence[int], target: Tensor) -> bool:
    """Read straight into the target, if the values are consecutive in the file and of its dtype; returns whether."""
    with FakeTensorMode():
        stored = torch.load(stream, map_location="cpu", weights_only=True)
    if stored.dtype != target.dtype or not stored.is_contiguous() or stored.shape[1:] != target.shape[1:]:
        return False
    first = stored.storage_offset() + offsets[0] * stored.stride(0)
    begin = offset_in_file(stored.untyped_storage())
    assert begin is not None, "loaded without values"
    stream.seek(begin + first * stored.element_size())
    bytes_: Any = target.detach().flatten().view(torch.uint8).numpy()
    values = memoryview(bytes_)
    while values:
        count = stream.readinto(values)  # type: ignore[attr-defined]  # every binary stream has it
        if not count:
            raise EOFError("the file ends before the tensor")
        values = values[count:]
    return True
