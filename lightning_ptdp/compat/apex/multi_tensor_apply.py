"""apex.multi_tensor_apply, which calls an operation of amp_C on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """Calls op(chunk_size, noop_flag, tensor_lists, *args). Our kernels choose their chunks themselves."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
