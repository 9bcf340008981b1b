"""The cache folder: what lies under its final name is complete, whoever wrote it and whatever was killed meanwhile."""

import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ASIDE = ".aside-"
_STALE_SECONDS = 7 * 24 * 3600.0

log = logging.getLogger(__name__)


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Make a folder beside `target` to write into, which is renamed to `target` when the context ends.

    Nobody waits for anybody: of several processes that write the same target the first to finish wins, and the others
    drop what they wrote. A block that raises leaves nothing; one that is killed leaves a folder under another name,
    which `remove_stale` removes.

    Raises:
        RuntimeError: the folder cannot be written.
    """
    aside = target.parent / f"{_ASIDE}{target.name}-{uuid.uuid4().hex}"
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise RuntimeError(
            f"the cache folder {target.parent} cannot be written ({error.strerror}); choose another with cache_dir="
        ) from error
    try:
        yield aside
        _rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text_at_once(target: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new text, never a part."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{_ASIDE}{target.name}-{uuid.uuid4().hex}")
    aside.write_text(text)
    aside.replace(target)


def remove_stale(folder: Path, *, older_than_seconds: float = _STALE_SECONDS) -> None:
    """Remove what killed processes left in `folder` long ago."""
    for left in folder.glob(f"{_ASIDE}*"):
        if time.time() - _last_written(left) > older_than_seconds:
            log.info("removing what a killed preparation left: %s", left)
            shutil.rmtree(left, ignore_errors=True)
            left.unlink(missing_ok=True)


def _rename(aside: Path, target: Path) -> None:
    try:
        os.rename(aside, target)
    except OSError:
        if not target.is_dir():
            raise


def _last_written(path: Path) -> float:
    inside = path.rglob("*") if path.is_dir() else ()
    return max((entry.stat().st_mtime for entry in [path, *inside] if entry.exists()), default=0.0)
