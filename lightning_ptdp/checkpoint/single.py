"""Writes a checkpoint as one ordinary file, tensor by tensor: rank 0 never holds more than one whole tensor of it.

Rank 0 writes a file in which there is room for all tensors, without values. Then each tensor in turn is put together
from the ranks that hold it, and written where it belongs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_ptdp.checkpoint import complete_or_absent
from lightning_ptdp.checkpoint.folder import Keys, Stored
from lightning_ptdp.checkpoint.rectangles import Located, Size, part
from lightning_ptdp.comm.collectives import gather_objects, receive_from, send_to
from lightning_ptdp.comm.groups import world
from lightning_ptdp.host.torch import FakeTensorMode, offset_in_file

_BLOCK = 1 << 24  # so many bytes are sent at once

Values = dict[Keys, Any]
Assemble = Callable[[Values], dict[str, Any]]
"""Nests values by their keys to a checkpoint, on rank 0."""


@dataclass(frozen=True)
class _Outline:
    """A tensor that ranks hold together.

    Attributes:
        size: shape of the whole tensor.
        dtype: of its elements.
        pieces: for each the rank that holds it, its offset in the whole, and its shape.
    """

    size: Size
    dtype: torch.dtype
    pieces: tuple[tuple[int, Size, Size], ...]


def save_file(path: Path, tensors: Mapping[Keys, Located], objects: Mapping[Keys, Any], assemble: Assemble) -> None:
    """Write one file on rank 0; every rank of the world calls it.

    Args:
        path: of the file.
        tensors: those that this rank contributes, and no other rank.
        objects: values that are no tensors, likewise.
        assemble: nests values by their keys to a checkpoint.
    """
    outlines, others = _outlines(tensors, objects)
    gathered = _gathered(outlines, tensors)
    try:
        if world().rank() == 0:
            values = placeholders(outlines)
            write_file(path, assemble({**values, **others}), values, gathered)
    finally:  # other ranks send everything, whatever happened here
        for _ in gathered:
            pass


def placeholders(outlines: Mapping[Keys, Stored | _Outline]) -> Values:
    """Make tensors without values, to be assembled to a checkpoint for `write_file`."""
    with FakeTensorMode():
        return {keys: torch.empty(outline.size, dtype=outline.dtype) for keys, outline in outlines.items()}


def write_file(path: Path, checkpoint: dict[str, Any], values: Values, tensors: Iterable[tuple[Keys, Tensor]]) -> None:
    """Write one file in this process, and give it its name when it is complete; one tensor at a time is in memory.

    Args:
        path: of the file.
        checkpoint: nested, with `placeholders` in the place of tensors.
        values: the placeholders, by their keys.
        tensors: the tensors that belong there, by the same keys, on the host.
    """
    with complete_or_absent.complete_file(path) as aside:
        locations = _write_without_values(aside, checkpoint)
        with aside.open("r+b") as stream:
            for tensor, offset in locations:
                if not _is_fake(tensor):
                    _write_at(stream, offset, torch.tensor([], dtype=torch.uint8).set_(tensor.cpu().untyped_storage()))
            offset_of = {id(tensor): offset for tensor, offset in locations}
            for keys, tensor in tensors:
                if id(values[keys]) in offset_of:
                    _write_at(stream, offset_of[id(values[keys])], tensor)
                del tensor  # before the next is made


def gather_whole(tensors: Mapping[Keys, Located], objects: Mapping[Keys, Any], assemble: Assemble) -> dict[str, Any]:
    """Gather the nested checkpoint with all values in the memory of rank 0; returns an empty one elsewhere."""
    outlines, others = _outlines(tensors, objects)
    values: Values = {keys: tensor.clone() for keys, tensor in _gathered(outlines, tensors)}
    return assemble({**values, **others}) if world().rank() == 0 else {}


def _outlines(tensors: Mapping[Keys, Located], objects: Mapping[Keys, Any]) -> tuple[dict[Keys, _Outline], Values]:
    """Describe what all ranks hold together, alike on each; and collect the objects."""
    mine = [
        (keys, located.size, [(r.offset, tuple(r.view.shape), r.view.dtype) for r in located.rectangles])
        for keys, located in tensors.items()
    ]
    outlines: dict[Keys, _Outline] = {}
    others: Values = {}
    for rank, (held, values) in enumerate(gather_objects((mine, dict(objects)), world())):
        others |= values
        for keys, size, rectangles in held:
            for offset, extent, dtype in rectangles:
                before = outlines[keys].pieces if keys in outlines else ()
                outlines[keys] = _Outline(size, dtype, (*before, (rank, offset, extent)))
    return outlines, others


def _gathered(outlines: Mapping[Keys, _Outline], tensors: Mapping[Keys, Located]) -> Iterator[tuple[Keys, Tensor]]:
    """Yield each whole tensor in turn, on rank 0's host; other ranks send theirs meanwhile, and yield nothing."""
    me = world().rank()
    for keys, outline in outlines.items():
        views = {r.offset: r.view for r in tensors[keys].rectangles} if keys in tensors else {}
        if me != 0:
            for rank, offset, _ in outline.pieces:
                if rank == me:
                    for block in _blocks(views[offset]):
                        send_to(block.detach().cpu().contiguous(), 0)
            continue
        yield keys, _whole(outline, views)


def _whole(outline: _Outline, views: Mapping[Size, Tensor]) -> Tensor:
    """Put a tensor together from rank 0's own views and from what others send."""
    whole = torch.empty(outline.size, dtype=outline.dtype)
    for rank, offset, extent in outline.pieces:
        view = part(whole, offset, extent)
        if rank == world().rank():
            view.copy_(views[offset])
            continue
        for block in _blocks(view):
            received = block if block.is_contiguous() else torch.empty_like(block)
            receive_from(received, rank)
            if received is not block:
                block.copy_(received)
    return whole


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor along the first dim into parts of about `_BLOCK` bytes."""
    if tensor.numel() == 0:
        return
    if tensor.ndim == 0:
        yield tensor
        return
    row = tensor[0].numel() * tensor.element_size()
    yield from tensor.split(max(1, _BLOCK // max(1, row)))


# -- a file without values --------------------------------------------------------------------------------------------


def _write_without_values(path: Path, checkpoint: dict[str, Any]) -> list[tuple[Tensor, int]]:
    """Save everything but the values of tensors; returns every tensor and the offset of its storage in the file."""
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(checkpoint, path)
    with FakeTensorMode():
        saved = torch.load(path, weights_only=False)  # written a moment ago
    mine, theirs = _tensors_in(checkpoint), _tensors_in(saved)
    if [tuple(t.shape) for t in mine] != [tuple(t.shape) for t in theirs]:
        raise RuntimeError(f"saving {path}: an object in the checkpoint holds other tensors once it is loaded")
    return [(tensor, _offset_of(t)) for tensor, t in zip(mine, theirs, strict=True)]


def _offset_of(tensor: Tensor) -> int:
    """Find the byte at which a tensor's storage begins in the file that it was loaded from, without values."""
    offset = offset_in_file(tensor.untyped_storage())
    assert offset is not None, "loaded without values"
    return int(offset)


class _Finder(pickle.Pickler):
    """Meets every tensor of an object in the order of pickling."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.found: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.found.append(obj)
        return id(obj)


def _tensors_in(value: Any) -> list[Tensor]:
    finder = _Finder()
    finder.dump(value)
    return finder.found


def _is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def _write_at(stream: BinaryIO, offset: int, tensor: Tensor) -> None:
    stream.seek(offset)
    stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
