"""Makes tensors without values look to code that builds a module like what they would be: tensors on the host.

Code asks, and acts on the answer: `torch.nn.init.orthogonal_` does nothing where `tensor.is_meta`, and
`torch.tensor([1.0], device=weight.device)` would lose its number on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_ptdp.deferred_init.recorder import Recorder
from lightning_ptdp.host.torch import TRUNCATED_NORMAL

_META, _HOST = torch.device("meta"), torch.device("cpu")
_ANSWERS = {
    getattr(Tensor, name).__get__: value for name, value in (("is_meta", False), ("is_cpu", True), ("device", _HOST))
}
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)  # make tensors of Python's values
_READERS = (Tensor.numpy, Tensor.__array__, Tensor.tolist)


@contextmanager
def illusion(recorder: Recorder) -> Iterator[None]:
    """Make tensors that the recorder put off seem to be on the host; to read one computes its values."""
    with _truncated_normal_in_one(recorder), _Illusion(recorder):
        yield


@contextmanager
def _truncated_normal_in_one(recorder: Recorder) -> Iterator[None]:
    """Record `trunc_normal_` as one operation.

    PyTorch's own draws again until no value lies outside the bounds. So it would read, and compute, the values of every
    weight on every rank.
    """
    function = getattr(torch.nn.init, TRUNCATED_NORMAL, None)
    if function is None:  # another version of torch: what it does is slow here, and right
        yield
        return
    setattr(torch.nn.init, TRUNCATED_NORMAL, partial(recorder.initialise, function))
    try:
        yield
    finally:
        setattr(torch.nn.init, TRUNCATED_NORMAL, function)


class _Illusion(TorchFunctionMode):
    """Answers, reads and makes tensors in the way that the head of this file says."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._recorder.is_inside:
            return func(*args, **kwargs)
        if func in _ANSWERS and self._recorder.defers(args[0]):
            return _ANSWERS[func]
        if func in _READERS:
            return func(self._recorder.value(args[0]), *args[1:], **kwargs)
        if func in _MAKERS and not isinstance(args[-1] if args else None, Tensor):
            device = kwargs.get("device", args[0].device if func is Tensor.new_tensor else None)
            if device is not None and torch.device(device) == _META:
                kwargs["device"] = _HOST
        return func(*args, **kwargs)
