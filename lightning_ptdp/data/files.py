"""Text files as a corpus: one file is one document."""

import glob
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets
from rich.console import Console
from rich.progress import track

from lightning_ptdp.names import first_few

from .corpus import Corpus, Documents, digest, mib

_MANY_BYTES = 2**28  # reading more than this takes long enough to show a progress bar

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextFile:
    """A readable UTF-8 file: its size in bytes and the digest of its content."""

    path: Path
    num_bytes: int
    digest: bytes


@dataclass(frozen=True)
class Rejected:
    """A file that cannot be a document, and why."""

    path: Path
    reason: str


class FileCorpus(Corpus):
    """The given files, one document each, in the order of their digests.

    That order depends on content alone, and is as good as shuffled. Files that cannot be read or are not UTF-8 are
    left out with a warning that names them; empty ones are left out quietly.

    Raises:
        ValueError: no file is left.
    """

    def __init__(self, name: str, paths: Sequence[Path], *, max_documents: int | None = None) -> None:
        found = _inspect_all(paths)
        rejected = [file for file in found if isinstance(file, Rejected)]
        kept = [file for file in found if isinstance(file, TextFile) and file.num_bytes > 0]
        _report(name, found, rejected, kept)
        kept.sort(key=_order)
        self._name = name
        self._files = tuple(kept[:max_documents])
        log.info(
            "corpus: %s, %d documents, %s", name, len(self._files), mib(sum(file.num_bytes for file in self._files))
        )

    @property
    def name(self) -> str:
        return self._name

    def content_digest(self) -> str:
        total = blake2b(digest_size=32)
        for file in self._files:
            total.update(file.digest)
        return total.hexdigest()

    def documents(self) -> Documents:
        rows = {"path": [str(file.path) for file in self._files], "digest": [file.digest for file in self._files]}
        return Documents(
            rows=datasets.Dataset.from_dict(rows),
            read=read_files,
            digests=rows["digest"],  # type: ignore[arg-type]
            num_bytes=[file.num_bytes for file in self._files],
        )


def read_files(batch: dict[str, list[Any]]) -> list[str]:
    """The texts of a batch of files, exactly as they are on disk.

    Raises:
        RuntimeError: a file's content is not what it was when the corpus was opened.
    """
    texts = []
    for path, expected in zip(batch["path"], batch["digest"], strict=True):
        content = Path(path).read_bytes()
        if digest(content) != expected:
            raise RuntimeError(f"{path} changed while it was being prepared; start again when it is at rest")
        texts.append(content.decode())
    return texts


def find_files(paths: Iterable[str]) -> list[Path]:
    """The files that a list of files, folders (searched to the bottom) and globs (`**` too) means, each once.

    In folders and globs, what is hidden (a leading dot) is left out.

    Raises:
        ValueError: an entry matches nothing.
    """
    files: dict[Path, None] = {}
    for entry in paths:
        matches = _matches(os.path.expanduser(entry))
        if not matches:
            raise ValueError(f"every entry of paths must name a file, a folder with files or a glob; {_why(entry)}")
        files.update(dict.fromkeys(file.resolve() for file in matches))
    return list(files)


def _matches(entry: str) -> list[Path]:
    path = Path(entry)
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    if path.exists():
        return [path]
    return sorted(Path(found) for found in glob.glob(entry, recursive=True) if Path(found).is_file())


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _why(entry: str) -> str:
    if Path(entry).expanduser().is_dir():
        return f"the folder {entry!r} holds no file"
    if glob.has_magic(entry):
        return f"the glob {entry!r} matches no file (seen from {Path.cwd()})"
    return f"{entry!r} does not exist (seen from {Path.cwd()})"


def _order(file: TextFile) -> tuple[bytes, str]:
    """By the end of the digest: its beginning decides what is held out, and the two must not go together."""
    return file.digest[8:], str(file.path)


def _inspect_all(paths: Sequence[Path]) -> list[TextFile | Rejected]:
    many = sum(path.stat().st_size for path in paths if path.exists()) > _MANY_BYTES
    with ThreadPoolExecutor() as pool:
        facts = pool.map(_inspect, paths)
        console = Console(stderr=True)
        return list(track(facts, "reading files", total=len(paths), disable=not many, console=console))


def _inspect(path: Path) -> TextFile | Rejected:
    try:
        content = path.read_bytes()
        content.decode()
    except OSError as error:
        return Rejected(path, error.strerror or type(error).__name__)
    except UnicodeDecodeError as error:
        return Rejected(path, f"not UTF-8 at byte {error.start}")
    return TextFile(path, len(content), digest(content))


def _report(name: str, found: Sequence[object], rejected: Sequence[Rejected], kept: Sequence[TextFile]) -> None:
    reasons = first_few([f"{file.path} ({file.reason})" for file in rejected], 3)
    num_empty = len(found) - len(rejected) - len(kept)
    if not kept:
        raise ValueError(
            f"a corpus needs at least one file with UTF-8 text; of the {len(found)} of {name}, {num_empty} are empty "
            f"and {len(rejected)} cannot be read" + (f": {reasons}" if reasons else "")
        )
    if rejected:
        log.warning(
            "corpus: %d of %d files are left out: %s; documents must be UTF-8", len(rejected), len(found), reasons
        )
    if num_empty:
        log.info("corpus: %d empty files are left out", num_empty)
