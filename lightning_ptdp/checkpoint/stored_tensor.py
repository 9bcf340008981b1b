"""Reading a tensor that `torch.save` wrote, to the place where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_ptdp.host.torch import FakeTensorMode, offset_in_file

_LARGE = 1 << 20  # bytes from which on it pays to look where the values lie


def read_tensor(stream: BinaryIO, offsets: Sequence[int], target: Tensor) -> None:
    """Read the part of a stored tensor that begins at `offsets` and has the target's size.

    Consecutive values go from the file to a contiguous target on the host; others are read whole, and copied.

    stream: from the tensor's first byte to its last.
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
    """Whether it could be done: the values are consecutive in the file, and of the target's dtype."""
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
