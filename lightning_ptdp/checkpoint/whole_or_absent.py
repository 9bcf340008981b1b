"""A checkpoint folder is whole, or it is not there.

It is written beside its place, under a name that no search takes for a checkpoint, and renamed when every rank is done
and the manifest lists each file. One that it replaces is kept until then.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"

_UNFINISHED, _REPLACED, _REMOVED = ".unfinished", ".replaced", ".removed"
_BLOCK = 1 << 24  # bytes that are read at once


def unfinished(path: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return path.with_name(f".{path.name}{_UNFINISHED}")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}{_REPLACED}")


def prepare(path: Path) -> Path:
    """An empty folder to write a checkpoint to; what an earlier attempt left there is deleted."""
    folder = unfinished(path)
    remove(folder)
    folder.mkdir(parents=True)
    return folder


def commit(path: Path, checksums: Mapping[str, int]) -> None:
    """Give what was written its name. checksums: CRC-32 of each file."""
    folder = unfinished(path)
    files = {name: {"bytes": (folder / name).stat().st_size, "crc32": crc} for name, crc in sorted(checksums.items())}
    _write(folder / MANIFEST, json.dumps({"format": "lightning_ptdp", "version": 1, "files": files}, indent=1))
    put_in_place(path)


def put_in_place(path: Path) -> None:
    """Give the folder that `prepare` made its name; what has it is kept until then."""
    folder = unfinished(path)
    sync(folder)
    old = _replaced(path)
    remove(old)
    if path.is_symlink() or path.exists():
        os.replace(path, old)
    try:
        os.replace(folder, path)
    except OSError:
        recover(path)
        raise
    sync(path.parent)
    remove(old)


def recover(path: Path) -> None:
    """Undo a replacement that was cut off between its two renames."""
    old = _replaced(path)
    if old.exists() and not path.exists():
        os.replace(old, path)


def remove(path: Path) -> None:
    """Delete a file, link or folder, if it is there. A folder loses its name first, so that no half of it is left."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        gone = path
        if not path.name.endswith((_UNFINISHED, _REPLACED)):
            gone = path.with_name(f".{path.name}{_REMOVED}")
            shutil.rmtree(gone, ignore_errors=True)
            os.replace(path, gone)
        shutil.rmtree(gone)


def cut_off(folder: Path) -> list[Path]:
    """Checkpoints beside each other in `folder` whose writing did not end, oldest first."""
    found = [path for path in folder.glob(f".*{_UNFINISHED}") if path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime)


@dataclass(frozen=True)
class File:
    """A file of a checkpoint. bytes, crc32: as they were written."""

    path: Path
    bytes: int
    crc32: int


def files(path: Path) -> list[File]:
    """What the manifest of a checkpoint lists; nothing where it has none (another program wrote it).

    Raises:
        RuntimeError: the manifest cannot be read.
    """
    manifest = path / MANIFEST
    if not manifest.exists():
        return []
    try:
        listed = json.loads(manifest.read_text())["files"]
        return [File(path / name, int(entry["bytes"]), int(entry["crc32"])) for name, entry in listed.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"the checkpoint file {manifest} is damaged ({error}); load another checkpoint") from error


def damage(file: File) -> str | None:
    """What is wrong with a file, in a sentence; None if it is as it was written."""
    if not file.path.exists():
        return f"the checkpoint file {file.path} is missing"
    size = file.path.stat().st_size
    if size != file.bytes:
        return f"the checkpoint file {file.path} has {size} bytes, and was written with {file.bytes}"
    if crc32(file.path) != file.crc32:
        return f"the checkpoint file {file.path} has other contents than were written to it"
    return None


def crc32(path: Path) -> int:
    """The checksum of a file."""
    value = 0
    with path.open("rb") as stream:
        for block in _blocks(stream):
            value = zlib.crc32(block, value)
    return value


def _blocks(stream: object) -> Iterator[memoryview]:
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
        yield view[:count]


def _write(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Make a file's contents, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
