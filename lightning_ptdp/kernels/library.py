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
    """What could be loaded.

    path: None if nothing could. reason: why nothing is compiled, or nothing for CUDA. instruction_set: of the CPU's
    kernels, "avx2" for example.
    """

    path: Path | None
    reason: str
    instruction_set: str = ""
    has_cuda: bool = False


@dataclass(frozen=True)
class LibraryOp:
    """An operation of the library, besides its schema, which stands in csrc/bindings.cpp.

    fake: shapes and dtypes of the results. save: keeps what backward needs. backward: the gradient; without it the
    operation refuses to be differentiated.
    """

    name: str
    fake: Callable[..., Any]
    save: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    has_gradient: bool = True

    def register(self) -> None:
        """Tell PyTorch."""
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
    """A result of x's shape and dtype, contiguous; others: arguments that do not change it."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cache
def load() -> Library:
    """Load the library: that of the wheel, else one from the cache, else build it.

    Never raises: where nothing can be loaded the result says why.
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
    """The library's path, and why it may have no CUDA kernels."""
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
    """Inside the block every operation is its reference in plain PyTorch."""
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
