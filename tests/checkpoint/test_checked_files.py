"""Files whose contents are compared while they are read."""

import io
import random

import pytest

from lightning_ptdp.checkpoint import checked_files
from lightning_ptdp.checkpoint.checked_files import File, Summing, checksums_of, opened
from lightning_ptdp.checkpoint.errors import DamagedFileError

SECTION = 8


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    monkeypatch.setattr(checked_files, "SECTION", SECTION)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 61])
def test_sums_do_not_depend_on_how_a_file_is_written(tmp_path, size):
    path, content, draw = tmp_path / "file", bytes(range(size)), random.Random(size)
    with path.open("wb") as stream:
        summing, at = Summing(stream), 0
        while at < size:
            at += summing.write(content[at : at + draw.randint(1, 20)])
        assert summing.tell() == size
    assert summing.checksums == checksums_of(path)
    assert len(summing.checksums) == -(-size // SECTION)


def written(path, content):
    path.write_bytes(content)
    return File(path, len(content), tuple(checksums_of(path)))


def read(stream, start, length):
    """As libraries read, past any buffer."""
    stream.raw.seek(start)
    buffer = bytearray(length)
    return bytes(buffer[: stream.raw.readinto(buffer)])


def test_parts_are_what_was_written(tmp_path):
    content = bytes(range(61))
    file, draw = written(tmp_path / "file", content), random.Random(1)
    with opened(file) as stream:
        for _ in range(200):
            start, length = draw.randint(0, 70), draw.randint(0, 40)
            assert read(stream, start, length) == content[start : start + length]
        assert stream.seek(-3, io.SEEK_END) == 58
        assert stream.read() == content[58:]
    assert file.damage() is None


@pytest.mark.parametrize("place", [0, 9, 60])
def test_only_who_reads_a_section_sees_its_damage(tmp_path, place):
    content = bytearray(range(61))
    file = written(tmp_path / "file", bytes(content))
    content[place] ^= 1
    file.path.write_bytes(content)
    section = place // SECTION * SECTION
    said = rf"{file.path} has other contents than were written to it, in the \d bytes from {section} on"
    with opened(file) as stream:
        for start in range(0, 61, SECTION):
            if start != section:
                assert read(stream, start, SECTION) == content[start : start + SECTION]
        with pytest.raises(DamagedFileError, match=said):
            read(stream, place, 1)
    assert "has other contents" in file.damage()


def test_file_that_lost_its_end_is_seen_by_its_size_and_when_it_is_read(tmp_path):
    file = written(tmp_path / "file", bytes(61))
    file.path.write_bytes(bytes(60))
    assert file.fault_of_size() == f"the checkpoint file {file.path} has 60 bytes, and was written with 61"
    with opened(file) as stream, pytest.raises(DamagedFileError, match="ends before the 61 bytes it had"):
        stream.read()


def test_sections_that_were_compared_are_not_compared_again(tmp_path):
    file, compared = written(tmp_path / "file", bytes(61)), set()
    with opened(file, compared) as stream:
        read(stream, 3, 10)
    assert compared == {0, 1}
    file.path.write_bytes(bytes([1]) * 61)
    with opened(file, compared) as stream:
        assert read(stream, 3, 10) == bytes([1]) * 10
