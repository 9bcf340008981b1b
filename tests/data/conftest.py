"""Small corpora on disk, and no progress bars."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


WriteFiles = Callable[[Mapping[str, str | bytes]], Path]


@pytest.fixture
def write_files(tmp_path: Path) -> WriteFiles:
    """Write files by name into one folder, and give the folder."""

    def write(contents: Mapping[str, str | bytes]) -> Path:
        folder = tmp_path / "corpus"
        for name, content in contents.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return write


@pytest.fixture
def forty_files(write_files: WriteFiles) -> Path:
    """Forty documents of different lengths; a fraction of 0.3 holds out about a dozen."""
    return write_files({f"{number}.txt": f"line of file {number}\n" * (number + 1) for number in range(40)})
