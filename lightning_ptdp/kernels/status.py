"""Tells what runs compiled kernels here and what references, and which other packages with such kernels are there."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from lightning_ptdp.kernels.library import CPU_DTYPES, CUDA_DTYPES, Library, load

# Files that NVIDIA's Apex has and that the web toolkit called apex on PyPI has not.
_APEX_FILES = (
    "multi_tensor_apply/multi_tensor_apply.py",
    "optimizers/fused_adam.py",
    "normalization/fused_layer_norm.py",
)
_OTHERS = {"Transformer Engine": "transformer_engine", "flash-attn": "flash_attn"}


@dataclass(frozen=True)
class Found:
    """Packages of others that are installed. None of them is imported to find that out, and none is needed.

    Attributes:
        apex: "nvidia", "other" (a package of that name that isn't NVIDIA's), or "absent".
        others: names of the other packages that were found.
    """

    apex: str
    others: tuple[str, ...]


def look_around() -> Found:
    """Look for NVIDIA Apex, Transformer Engine and flash-attn by their files."""
    return Found(find_apex(), tuple(name for name, package in _OTHERS.items() if _folders(package) is not None))


def find_apex() -> str:
    """Look which apex is installed, by its files, none of which is run: "nvidia", "other" or "absent"."""
    folders = _folders("apex")
    if folders is None:
        return "absent"
    return "nvidia" if any(all((folder / file).is_file() for file in _APEX_FILES) for folder in folders) else "other"


def _folders(package: str) -> list[Path] | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a broken finder, or a module without a spec in sys.modules
        return None
    return None if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def in_a_line() -> str:
    """Say in a line, for the start of a run, which kernels are compiled."""
    library, found = load(), look_around()
    if library.path is None:
        compiled = f"none compiled, PyTorch's own operations serve ({_first_line(library.reason)})"
    else:
        cuda = "compiled" if library.has_cuda else f"references ({library.reason})"
        compiled = f"CPU compiled ({library.instruction_set}), CUDA {cuda}"
    return f"kernels: {compiled}; {describe(found)}"


def describe(found: Found) -> str:
    """Say in a clause which packages of others were found."""
    names = (["NVIDIA Apex"] if found.apex == "nvidia" else []) + list(found.others)
    note = "; the package apex is not NVIDIA's and is left alone" if found.apex == "other" else ""
    return ("found " + ", ".join(names) if names else "no NVIDIA Apex, Transformer Engine or flash-attn found") + note


def rows() -> list[tuple[str, str, str]]:
    """Make a table of rows (device, dtype, what runs there and why)."""
    library = load()
    table = []
    for device, dtypes, is_compiled in (
        ("cpu", CPU_DTYPES, library.path is not None),
        ("cuda", CUDA_DTYPES, library.has_cuda),
    ):
        for dtype in CUDA_DTYPES:
            name = str(dtype).removeprefix("torch.")
            if dtype not in dtypes:
                table.append((device, name, "reference: not compiled for this device"))
            elif is_compiled:
                table.append((device, name, _level(device, library)))
            else:
                table.append((device, name, f"reference: {_first_line(library.reason)}"))
        table.append((device, "float64", "reference, always"))
    return table


def _level(device: str, library: Library) -> str:
    return f"compiled, {library.instruction_set}" if device == "cpu" else "compiled"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
