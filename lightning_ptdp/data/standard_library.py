"""The default corpus: the source files of Python's own standard library, text that every machine has."""

import sysconfig
from collections import Counter
from pathlib import Path

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_FEWEST_FILES = 100  # a whole library has several hundred; a stripped one a handful that only start the interpreter


def standard_library_files(folder: Path | None = None) -> list[Path]:
    """Find the `.py` files of the standard library, without tests and installed packages.

    Args:
        folder: where the library lies; that of the running interpreter by default.

    Raises:
        ValueError: the library was stripped of its sources or lies in a zip archive.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = sorted(file for file in folder.rglob("*.py") if not _LEFT_OUT.intersection(file.relative_to(folder).parts))
    if len(files) < _FEWEST_FILES:
        raise ValueError(
            f"the default corpus is the source of Python's standard library, at least {_FEWEST_FILES} .py files; "
            f"{folder} {_what_is_there(folder, len(files))}: the library is stripped or zipped; "
            "give your own text with paths=[...] or dataset=..."
        )
    return files


def _what_is_there(folder: Path, num_sources: int) -> str:
    if not folder.is_dir():
        archives = sorted(folder.parent.glob("python*.zip")) if folder.parent.is_dir() else []
        return "is no folder" + (f" (beside it lies {archives[0].name})" if archives else "")
    kinds = Counter(file.suffix or "no suffix" for file in folder.rglob("*") if file.is_file())
    others = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3) if kind != ".py")
    return f"holds {num_sources} of them" + (f" (and {others})" if others else "")
