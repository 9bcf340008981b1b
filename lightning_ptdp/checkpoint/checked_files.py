"""Reads files and compares them with checksums that were taken while they were written.

A checksum covers a section of a file, so that to read and check a part of a file takes little more than that part.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_64, xxh3_64_intdigest

from lightning_ptdp.checkpoint.errors import DamagedFileError

SECTION = 1 << 20  # so many bytes are covered by one checksum


@dataclass(frozen=True)
class File:
    """A file as it was written.

    Attributes:
        path: of the file.
        bytes: its size.
        checksums: XXH3 (64 bits) of each section.
    """

    path: Path
    bytes: int
    checksums: tuple[int, ...]

    def fault_of_size(self) -> str | None:
        """Say that the file is missing, or longer or shorter than it was written; None if neither."""
        if not self.path.exists():
            return f"the checkpoint file {self.path} is missing"
        size = self.path.stat().st_size
        if size != self.bytes:
            return f"the checkpoint file {self.path} has {size} bytes, and was written with {self.bytes}"
        return None

    def damage(self) -> str | None:
        """Say what is wrong with the file, contents included; None if it is as it was written."""
        fault = self.fault_of_size()
        if fault is None:
            try:
                with opened(self) as stream:
                    for _ in iter(lambda: stream.read(SECTION), b""):
                        pass
            except DamagedFileError as error:
                return str(error)
        return fault


def faults_of(files: Iterable[File], *, contents: bool) -> list[str]:
    """Find what is wrong with files; returns a sentence for each that is not as it was written.

    Args:
        files: to look at.
        contents: whether they are read and compared; if not, only their sizes are.
    """
    found = (file.damage() if contents else file.fault_of_size() for file in files)
    return [fault for fault in found if fault is not None]


def checksums_of(path: Path) -> list[int]:
    """Read a file, and compute its checksums."""
    with path.open("rb") as stream:
        return [xxh3_64_intdigest(section) for section in iter(lambda: stream.read(SECTION), b"")]


class Summing:
    """A stream that takes checksums of what is written to it, from its beginning to its end."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._section, self._room = stream, xxh3_64(), SECTION
        self._done: list[int] = []

    def write(self, data: Any) -> int:
        """Write, as the stream does."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            part = view[at : at + self._room]
            self._section.update(part)
            at += len(part)
            self._room -= len(part)
            if self._room == 0:
                self._done.append(self._section.intdigest())
                self._section, self._room = xxh3_64(), SECTION
        return int(self._stream.write(data))

    @property
    def checksums(self) -> list[int]:
        """The checksums of the sections written so far."""
        return self._done if self._room == SECTION else [*self._done, self._section.intdigest()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def opened(file: File, compared: set[int] | None = None) -> Iterator[BinaryIO]:
    """Open a file to read; to read a part that is not as it was written raises DamagedFileError.

    Args:
        file: as it was written.
        compared: numbers of the sections that were compared before, which are not compared again; those that are
            compared now are added.
    """
    compared = set() if compared is None else compared
    with file.path.open("rb", buffering=0) as raw, io.BufferedReader(_Compared(file, raw, compared)) as stream:
        yield stream


class _Compared(io.RawIOBase):
    """A stream that compares each section when a part of it is first read.

    A section of which a part is read is kept, for the next part. One that is read in one go is not copied.
    """

    def __init__(self, file: File, raw: io.FileIO, compared: set[int]) -> None:
        self._file, self._raw, self._compared, self._at = file, raw, compared, 0
        self._room = memoryview(bytearray(min(SECTION, file.bytes)))
        self._kept: tuple[int, memoryview] = (-1, self._room)  # a section of which a part was read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.bytes}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._file.bytes - self._at)]
        done = 0
        while done < len(view):
            section, inside = divmod(self._at + done, SECTION)
            part = view[done : done + SECTION - inside]
            self._read(section, inside, part)
            done += len(part)
        self._at += done
        return done

    def _read(self, section: int, inside: int, part: memoryview) -> None:
        length = min(SECTION, self._file.bytes - section * SECTION)
        kept, content = self._kept
        if section == kept:
            part[:] = content[inside : inside + len(part)]
        elif section in self._compared:
            self._fill(part, section * SECTION + inside)
        elif len(part) == length:
            self._fill(part, section * SECTION)
            self._compare(section, part)
        else:
            self._kept, content = (-1, self._room), self._room[:length]
            self._fill(content, section * SECTION)
            self._compare(section, content)
            self._kept = section, content
            part[:] = content[inside : inside + len(part)]

    def _fill(self, part: memoryview, offset: int) -> None:
        self._raw.seek(offset)
        while part:
            count = self._raw.readinto(part)
            if not count:
                raise DamagedFileError(
                    f"the checkpoint file {self._file.path} ends before the {self._file.bytes} bytes it had"
                )
            part = part[count:]

    def _compare(self, section: int, content: memoryview) -> None:
        if xxh3_64_intdigest(content) != self._file.checksums[section]:
            raise DamagedFileError(
                f"the checkpoint file {self._file.path} has other contents than were written to it, in the "
                f"{len(content)} bytes from {section * SECTION} on"
            )
        self._compared.add(section)
