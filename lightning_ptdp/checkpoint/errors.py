"""Errors of saving and loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CheckpointError(RuntimeError):
    """Saving or loading failed; it is raised on every rank.

    is_damage: whether a file is missing or damaged.
    """

    is_damage = False


class DamagedFileError(RuntimeError):
    """A file of a checkpoint is missing or damaged; seen by the rank that reads it."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in the operating system's errors within the context, which of a full disk do not say any."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
