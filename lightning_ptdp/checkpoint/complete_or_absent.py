"""A checkpoint folder is complete, or it is not there.

It is written beside its place, under a name that no search takes for a checkpoint, and renamed when every rank is done
and the manifest lists each file. One that it replaces is kept until then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_ptdp.checkpoint.checked_files import SECTION, File
from lightning_ptdp.checkpoint.errors import DamagedFileError, naming

MANIFEST = "manifest.json"

_UNFINISHED, _REPLACED, _REMOVED = ".unfinished", ".replaced", ".removed"


def unfinished(path: Path) -> Path:
    """The path to which a checkpoint is written until it is complete."""
    return path.with_name(f".{path.name}{_UNFINISHED}")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}{_REPLACED}")


def prepare(path: Path) -> Path:
    """Make an empty folder to write a checkpoint to; what an earlier attempt left there is deleted."""
    folder = unfinished(path)
    remove(folder)
    folder.mkdir(parents=True)
    return folder


def commit(path: Path, checksums: Mapping[str, Sequence[int]]) -> None:
    """Give what was written its name.

    Args:
        path: the name.
        checksums: of the sections of each file, by its name.
    """
    folder = unfinished(path)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "xxh3": list(each)} for name, each in sorted(checksums.items())
    }
    manifest = {"format": "lightning_ptdp", "version": 1, "section": SECTION, "files": files}
    _write(folder / MANIFEST, json.dumps(manifest))
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


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Give a path to write a checkpoint of one file to; when the context ends it replaces what is at its own path.

    Args:
        path: its own.

    Raises:
        OSError: it cannot be written. What had the name stays, and nothing else is left.
    """
    aside = unfinished(path)
    with naming(aside):
        aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        with naming(aside):
            yield aside
            sync(aside)
        if path.is_dir():
            remove(path)
        os.replace(aside, path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


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
    """Find checkpoints in `folder` whose writing did not end, oldest first."""
    found = [path for path in folder.glob(f".*{_UNFINISHED}") if path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def files(path: Path) -> list[File]:
    """Read what the manifest of a checkpoint lists; nothing if it has none, as another program wrote it.

    Raises:
        DamagedFileError: the manifest cannot be read.
        ValueError: it is of another version.
    """
    manifest = path / MANIFEST
    if not manifest.exists():
        return []
    try:
        known = json.loads(manifest.read_text())
        form = known["version"], known["section"]
        found = [
            File(path / name, int(entry["bytes"]), tuple(map(int, entry["xxh3"])))
            for name, entry in known["files"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"the checkpoint file {manifest} is damaged ({error}); load another checkpoint"
        ) from error
    if form != (1, SECTION):
        raise ValueError(
            f"{manifest} is of version {form[0]} with sections of {form[1]} bytes, and this version of lightning_ptdp "
            f"reads version 1 with {SECTION}; load the checkpoint with the version that saved it"
        )
    return found


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
