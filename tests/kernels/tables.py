"""Tables of kernels other than the one that this machine runs: another instruction set's, or CUDA's, emulated.

Each lies in a library of its own, built once a machine; one set of bindings, `torch.ops.ptdp_test`, runs whichever was
handed to it last.
"""

import ctypes
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lightning_ptdp.kernels import build

EMULATION = Path(__file__).with_name("emulation.h")
_SHARED = ("-std=c++20", "-fPIC", "-Wno-psabi")


def operations(library: Path, function: str) -> Any:
    """Operations that run the table which `function` of a library returns."""
    table = ctypes.CDLL(str(library))[function]
    table.restype = ctypes.c_void_p
    _bindings().ptdp_test(ctypes.c_void_p(table()))
    return torch.ops.ptdp_test


@cache
def _bindings() -> ctypes.CDLL:
    folder = build.torch_folder()
    flags = ("-DPTDP_TESTED", "-DPTDP_NAMESPACE=ptdp_test")
    path = build.cached(build.plan(build.sources(), build.compiler(), folder, levels=(), nvcc=None, extra=flags))
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def cpu_table(level: str) -> tuple[Path, str]:
    """The kernels for one of the CPU's instruction sets, and the function that returns them."""
    plan = build.plan(build.sources(), build.compiler(), build.torch_folder(), levels=(level,), nvcc=None)
    objects = {"kernels.o": tuple(f for f in plan.objects[f"cpu_{level}.o"] if f != "-fvisibility=hidden")}
    return _shared(build.sources(), objects), f"ptdp_cpu_{level}"


def emulated_table(edit: Callable[[Path], None] = lambda folder: None) -> tuple[Path, str]:
    """CUDA's kernels for the CPU, from a copy of the sources that `edit` may change."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "csrc"
        shutil.copytree(build.sources(), folder)
        shutil.copy(EMULATION, folder)
        edit(folder)
        include = f"-I{build.torch_folder()}/include"
        emulated = ("-O1", "-x", "c++", "-DPTDP_EMULATED", "-include", "emulation.h", include)
        command = (build.compiler(), *_SHARED, *emulated, "-c", "cuda/kernels.cu")
        return _shared(folder, {"kernels.o": command}), "ptdp_cuda"


def _shared(folder: Path, objects: dict[str, tuple[str, ...]]) -> Path:
    return build.cached(build.Plan(folder, objects, (build.compiler(), "-shared", *objects)))
