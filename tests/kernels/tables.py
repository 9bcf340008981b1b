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
    commands = build.commands_for(build.sources(), build.compiler(), folder, levels=(), nvcc=None, extra=flags)
    path = build.cached(commands)
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def cpu_table(level: str) -> tuple[Path, str]:
    """The kernels for one of the CPU's instruction sets, and the function that returns them."""
    commands = build.commands_for(build.sources(), build.compiler(), build.torch_folder(), levels=(level,), nvcc=None)
    objects = {"kernels.o": tuple(f for f in commands.objects[f"cpu_{level}.o"] if f != "-fvisibility=hidden")}
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


def cuda_object() -> tuple[Path, str]:
    """CUDA's kernels as nvcc compiles them, once for all tests, and what ptxas says of each."""
    nvcc = build.nvcc()
    assert nvcc is not None, "asked for where there is an nvcc only"
    # the last argument is where the object goes; what is beside its folder stays
    script = 'for out; do :; done; log="${out%/*}/../ptxas.log"; "$@" >"$log" 2>&1 || { cat "$log"; exit 1; }'
    command = ("sh", "-c", script, "sh", *build.cuda_command(nvcc, "-Xptxas", "-v"))
    compiled = build.cached(build.Commands(build.sources(), {}, command))
    return compiled, (compiled.parent / "ptxas.log").read_text()


def linked_with_cuda(namespace: str) -> Path:
    """The library as a wheel for CUDA carries it, with the CPU's baseline."""
    flags, folder = (f"-DPTDP_NAMESPACE={namespace}",), build.torch_folder()
    commands = build.commands_for(
        build.sources(), build.compiler(), folder, levels=("baseline",), nvcc=build.nvcc(), extra=flags
    )
    cuda, _ = cuda_object()
    link = tuple(str(cuda) if part == "cuda.o" else part for part in commands.link)
    return build.cached(
        build.Commands(commands.sources, {k: v for k, v in commands.objects.items() if k != "cuda.o"}, link)
    )


def _shared(folder: Path, objects: dict[str, tuple[str, ...]]) -> Path:
    return build.cached(build.Commands(folder, objects, (build.compiler(), "-shared", *objects)))
