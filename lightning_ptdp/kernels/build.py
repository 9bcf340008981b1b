"""Builds csrc/ into one shared library: g++ for the CPU, nvcc for CUDA where PyTorch has it.

Standard library only, and loadable by path: setup.py uses it too. Needed are a C++ compiler and an installed PyTorch
(its headers and libraries; it isn't imported). Finished libraries lie in a cache, by a digest of sources, commands and
compilers, so that each is built once a machine. One process builds, others wait for it; a build that is killed leaves
nothing that another would take for a library.

Environment variables that steer a build:
    PTDP_BUILD         "auto", "off" (build nothing) or "require" (of a wheel: fail rather than leave the library out)
    PTDP_CUDA          "1" or "0": compile for CUDA, or don't; by default if the installed PyTorch has CUDA
    PTDP_CUDA_ARCHS    compute capabilities, "80;90;100"
    PTDP_CACHE         where finished libraries lie; by default lightning_ptdp below XDG_CACHE_HOME or ~/.cache
    CXX, CUDA_HOME     the compilers
    MAX_JOBS           compilers at the same time
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

LIBRARY = "libptdp_kernels.so"
STABLE_ABI = "0x020b000000000000"  # of torch 2.11, and so of every later one
LOG_TAIL = 3000  # characters of a failed compiler's output that are shown

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
# instruction set -> (floats in a register, flags); the baseline is what every machine of its kind has
_LEVELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "baseline": (4, ()),
    "avx2": (8, _AVX2),
    "avx512": (16, _AVX2 + _AVX512),
}
_MATHS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")


class BuildError(RuntimeError):
    """Nothing was built; says why, and ends with the tail of the compiler's output."""


@dataclass(frozen=True)
class Commands:
    """Commands, by the name of what each makes: objects, and at last the library. Run in the folder of the sources."""

    sources: Path
    objects: dict[str, tuple[str, ...]]
    link: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the sources, the commands and the compilers' versions."""
        commands = [*sorted(self.objects.items()), self.link]
        found = hashlib.sha256(repr((commands, platform.machine())).encode())
        for path in sorted(self.sources.rglob("*")):
            if path.is_file():
                found.update(str(path.relative_to(self.sources)).encode() + path.read_bytes())
        for compiler in sorted({command[0] for command in self.objects.values()}):
            found.update(subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout)
        return found.hexdigest()[:20]


def commands_here() -> Commands:
    """The commands for this machine.

    Raises:
        BuildError: there is no compiler, no PyTorch, or PTDP_BUILD=off.
    """
    if os.environ.get("PTDP_BUILD") == "off":
        raise BuildError("PTDP_BUILD=off")
    torch = torch_folder()
    levels = tuple(_LEVELS) if platform.machine() in ("x86_64", "AMD64") else ("baseline",)
    return commands_for(sources(), compiler(), torch, levels=levels, nvcc=nvcc() if wants_cuda(torch) else None)


def is_required() -> bool:
    """Whether a wheel must not be made without the kernels: PTDP_BUILD=require."""
    return os.environ.get("PTDP_BUILD") == "require"


def commands_for(
    folder: Path, cxx: str, torch: Path, *, levels: Sequence[str], nvcc: str | None, extra: Sequence[str] = ()
) -> Commands:
    """Commands to compile the sources in `folder` for some of the instruction sets. extra: flags for the bindings."""
    base = (cxx, "-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
    headers = ("-isystem", f"{torch}/include", f"-DTORCH_TARGET_VERSION={STABLE_ABI}")
    has_avx = ("-DPTDP_AVX",) if "avx2" in levels else ()
    has_cuda = ("-DPTDP_CUDA", "-DUSE_CUDA") if nvcc else ()
    objects = {"bindings.o": (*base, *headers, *has_avx, *has_cuda, *extra, "-c", "bindings.cpp")}
    for level in levels:
        lanes, flags = _LEVELS[level]
        defines = (f"-DPTDP_LEVEL={level}", f"-DPTDP_LANES={lanes}")
        objects[f"cpu_{level}.o"] = (*base, *_MATHS, *defines, *flags, "-c", "cpu/kernels.cpp")
    if nvcc:
        objects["cuda.o"] = cuda_command(nvcc)
    runtime = (f"-L{Path(nvcc).parent.parent}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread") if nvcc else ()
    # --no-as-needed keeps libtorch.so, and through it libtorch_cuda.so, where the weak symbol of the stream lies
    link = (cxx, "-shared", *objects, "-Wl,--no-as-needed", f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", *runtime)
    return Commands(folder, objects, link)


def cuda_command(nvcc: str, *more: str) -> tuple[str, ...]:
    """How the CUDA kernels are compiled; no header of PyTorch is needed."""
    archs = os.environ.get("PTDP_CUDA_ARCHS", "80;90;100").split(";")
    codes = [f for arch in archs for f in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    codes += ["-gencode", f"arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
    flags = ("-O3", "-std=c++17", "--threads", "0", "-Xcompiler", "-fPIC,-fvisibility=hidden")
    return (nvcc, *flags, *codes, *more, "-c", "cuda/kernels.cu")


def cached(commands: Commands, *, again: bool = False) -> Path:
    """The library that commands make, from the cache, or built into it.

    again: build it also if it's there, or if building it has failed before.

    Raises:
        BuildError: it cannot be built, now or, unless `again`, the last time.
    """
    folder = cache() / commands.digest
    library, failure = folder / LIBRARY, folder / "failed.log"
    if library.exists() and not again:
        return library
    with _lock(folder):
        if library.exists() and not again:
            return library  # another process has built it meanwhile
        if failure.exists() and not again:
            raise BuildError(
                f"the build failed before (ptdp kernels --build-again true tries again):\n{failure.read_text()}"
            )
        failure.unlink(missing_ok=True)
        log.info("building the kernels into %s, once for this machine", folder)
        try:
            build(commands, library)
        except BuildError as error:
            failure.write_text(str(error))
            raise
    return library


def build(commands: Commands, library: Path) -> None:
    """Run the commands; the library appears whole or not at all.

    Raises:
        BuildError: a command failed.
    """
    workshop = library.parent / "building"
    shutil.rmtree(workshop, ignore_errors=True)  # of a build that was killed
    workshop.mkdir(parents=True)
    try:
        num_jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(num_jobs) as pool:
            compiling = [(*command, "-o", str(workshop / name)) for name, command in commands.objects.items()]
            list(pool.map(lambda command: _run(command, commands.sources), compiling))
        link = tuple(str(workshop / part) if part in commands.objects else part for part in commands.link)
        _run((*link, "-o", str(workshop / LIBRARY)), commands.sources)
        os.replace(workshop / LIBRARY, library)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-LOG_TAIL:]}")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time; the system ends the lock with the process, so none outlives a kill."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise BuildError(f"the cache {folder.parent} cannot be written ({error}); set PTDP_CACHE") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache() -> Path:
    """Where finished libraries lie."""
    named = os.environ.get("PTDP_CACHE")
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else above / "lightning_ptdp"


def sources() -> Path:
    """csrc/: beside the package's modules in an install, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next((folder for folder in (package / "csrc", package.parent / "csrc") if folder.is_dir()), package / "csrc")


def compiler() -> str:
    """The C++ compiler.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(f"no C++ compiler: {wanted} is not on the path; install one, or name it in CXX")
    return found


def nvcc() -> str | None:
    """CUDA's compiler, if there is one."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [Path(home) / "bin/nvcc" for home in (*homes, "/usr/local/cuda") if home]
    return next((str(path) for path in found if os.access(path, os.X_OK)), shutil.which("nvcc"))


def torch_folder() -> Path:
    """Where PyTorch is installed.

    Raises:
        BuildError: it isn't.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("no PyTorch in this environment, whose headers a build needs (pip: --no-build-isolation)")
    return Path(spec.origin).parent


def wants_cuda(torch: Path) -> bool:
    """Whether to compile for CUDA: as PTDP_CUDA says, else if the installed PyTorch has it."""
    said = os.environ.get("PTDP_CUDA")
    if said is not None:
        return said == "1"
    version = torch / "version.py"
    return version.exists() and re.search(r"^cuda\b.*= *'", version.read_text(), re.M) is not None
