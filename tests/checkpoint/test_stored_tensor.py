"""A stored tensor is read to the place where it belongs."""

import io

import pytest
import torch

from lightning_ptdp.checkpoint import stored_tensor
from lightning_ptdp.checkpoint.stored_tensor import read_tensor

WHOLE = torch.arange(2 * 3 * 5.0).view(2, 3, 5)


def stream_of(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    stream.seek(0)
    return stream


CASES = {
    "all": (WHOLE, (0, 0, 0), (2, 3, 5)),
    "rows": (WHOLE, (1, 0, 0), (1, 3, 5)),
    "columns": (WHOLE, (0, 0, 2), (2, 3, 2)),
    "a corner": (WHOLE, (1, 1, 1), (1, 2, 3)),
    "of other strides": (WHOLE.permute(2, 0, 1), (1, 0, 0), (3, 2, 3)),
    "of a view": (WHOLE.flatten()[4:], (3,), (20,)),
    "of another dtype": (WHOLE.to(torch.bfloat16), (0, 0, 0), (2, 3, 5)),
    "a number": (torch.tensor(3.0), (), ()),
    "nothing": (torch.empty(0, 4), (0, 0), (0, 4)),
}


@pytest.mark.parametrize("large", [0, 1 << 20], ids=["where values lie", "whole"])
@pytest.mark.parametrize(("stored", "offsets", "size"), CASES.values(), ids=CASES)
def test_part_is_what_was_saved(monkeypatch, stored, offsets, size, large):
    monkeypatch.setattr(stored_tensor, "_LARGE", large)
    expected = stored[tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))].float()
    spread = torch.full((*size, 2), torch.nan)[..., 0]
    for target in (torch.full(size, torch.nan), spread):
        read_tensor(stream_of(stored), offsets, target)
        assert torch.equal(target, expected)


def test_values_of_a_large_tensor_go_to_their_place_at_once(monkeypatch):
    monkeypatch.setattr(stored_tensor, "_LARGE", 0)
    stream, calls = stream_of(WHOLE), []
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *arguments: calls.append(1) or real(*arguments))
    read_tensor(stream, (0, 0, 0), torch.empty(2, 3, 5))
    assert not calls


def test_stream_that_ends_too_soon_raises(monkeypatch):
    monkeypatch.setattr(stored_tensor, "_LARGE", 0)
    content = stream_of(WHOLE).getvalue()
    with pytest.raises(RuntimeError):
        read_tensor(io.BytesIO(content[:-200]), (0, 0, 0), torch.empty(2, 3, 5))
