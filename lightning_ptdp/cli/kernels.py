"""`ptdp kernels` and `ptdp doctor`: what runs compiled here, and what the machine has."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from lightning_ptdp.kernels import build, load
from lightning_ptdp.kernels.status import describe, look_around, rows

from .terminal import say, show_table

_PACKAGES = ("lightning_ptdp", "torch", "lightning", "transformers")


def show_kernels(*, build_again: bool = False) -> None:
    """Say for each device and dtype whether compiled kernels run or the references, and why.

    Args:
        build_again: compile the kernels first, even if they are there or compiling them failed before.
    """
    if build_again:
        say(f"built {build.cached(build.commands_here(), again=True)}")
    library = load()
    show_table("kernels", ["device", "dtype", "what runs"], rows())
    say(f"\nlibrary: {library.path or 'none'}")
    if library.reason:
        say(f"why not all are compiled: {library.reason}")
    say(describe(look_around()))


def diagnose() -> None:
    """List versions, devices and compilers, then what `ptdp kernels` says."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts = [
        ["python", platform.python_version()],
        *([name, _version(name)] for name in _PACKAGES),
        ["machine", f"{platform.machine()}, {torch.get_num_threads()} threads"],
        ["CUDA devices", ", ".join(devices) or "none"],
        ["C++ compiler", _compiler()],
        ["nvcc", build.nvcc() or "none"],
    ]
    show_table("this machine", ["what", "value"], facts)
    say("")
    show_kernels()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    try:
        return build.compiler()
    except build.BuildError as error:
        return str(error)
