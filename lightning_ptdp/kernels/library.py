"""Loads the compiled library, and says what is compiled and why the rest isn't."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.kernels import build

log = logging.getLogger(__name__)

CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Library:
    """The compiled library, as far as it could be loaded.

    Attributes:
        path: of its file; None if nothing could be loaded.
        reason: why nothing is compiled, or nothing for CUDA; "" if all is.
        instruction_set: what the CPU's kernels use, "avx2" for example.
        has_cuda: whether it has kernels for CUDA.
    """

    path: Path | None
    reason: str
    instruction_set: str = ""
    has_cuda: bool = False


@dataclass(frozen=True)
class LibraryOp:
    """An operation of the library: what PyTorch must know of it besides its schema, which stands in csrc/bindings.cpp.

    Attributes:
        name: as in the schema.
        fake: makes results without values, of the right shapes and dtypes.
        save: keeps what `backward` needs, as `torch.library.register_autograd` calls it.
        backward: computes the gradients of the arguments. Without it the operation refuses to be differentiated.
        has_gradient: False for an operation that works in place, of which autograd is not told.
    """

    name: str
    fake: Callable[..., Any]
    save: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    has_gradient: bool = True

    def register(self) -> None:
        """Register the operation with PyTorch."""
        torch.library.register_fake(f"ptdp::{self.name}", self.fake)
        if self.backward is not None:
            torch.library.register_autograd(f"ptdp::{self.name}", self.backward, setup_context=self.save)
        elif self.has_gradient:
            torch.library.register_autograd(f"ptdp::{self.name}", self._refuse)

    def _refuse(self, ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(
            f"ptdp::{self.name} is the gradient of a fused kernel and has none of its own; for second derivatives run "
            "the references: with lightning_ptdp.kernels.references()"
        )


OPERATIONS: list[LibraryOp] = []
"""All operations of the library; each file of kernels adds its own as it is imported."""


def contiguous_like(x: Tensor, *others: object) -> Tensor:
    """The fake of operations whose result has x's shape and dtype and is contiguous.

    Args:
        x: the first argument of the operation.
        others: its other arguments, which do not matter here.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cache
def load() -> Library:
    """Load the library, once: that of the wheel, else one from the cache, else it is built.

    Never raises: if nothing can be loaded the result says why.
    """
    try:
        path, why_no_cuda = _find()
        torch.ops.load_library(str(path))
    except (build.BuildError, OSError, RuntimeError) as error:
        log.debug("kernels: none compiled: %s", error)
        return Library(None, str(error))
    for operation in OPERATIONS:
        operation.register()
    has_cuda: bool = torch.ops.ptdp.has_cuda()
    return Library(path, "" if has_cuda else why_no_cuda, torch.ops.ptdp.instruction_set(), has_cuda)


def _find() -> tuple[Path, str]:
    """Find or build the library; returns its path, and why it has no CUDA kernels, in case it has none."""
    packaged = Path(__file__).parent / build.LIBRARY
    if packaged.exists():
        return packaged, "the wheel's library was built without CUDA"
    if torch.version.cuda is None:
        why = "this PyTorch is a build for CPUs"
    else:
        why = "no nvcc was found" if build.nvcc() is None else "the library was built without CUDA"
    return build.cached(build.commands_here()), why


_references_only = False


@contextmanager
def references() -> Iterator[None]:
    """Run the references in plain PyTorch in place of all compiled kernels, within the context."""
    global _references_only  # noqa: PLW0603  a switch of the process, as torch's own are
    before, _references_only = _references_only, True
    try:
        yield
    finally:
        _references_only = before


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_compiled(device_type: str, dtype: torch.dtype) -> bool:
    """Whether tensors of a device and dtype run compiled kernels; all others run the references."""
    if _references_only or device_type not in ("cpu", "cuda"):
        return False
    if device_type == "cpu":
        return dtype in CPU_DTYPES and load().path is not None
    return dtype in CUDA_DTYPES and load().has_cuda
