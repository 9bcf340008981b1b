"""Files, folders and globs as documents; what cannot be one is named."""

import logging
from pathlib import Path

import pytest

from lightning_ptdp.data import FileCorpus, find_files
from lightning_ptdp.data.files import read_files


def names(files: list[Path]) -> list[str]:
    return sorted(file.name for file in files)


def texts_of(corpus: FileCorpus) -> list[str]:
    documents = corpus.documents()
    return documents.read(documents.rows[:])


def test_files_folders_and_globs_are_found_once_each(write_files):
    folder = write_files({"a.txt": "a", "b.md": "b", "deep/er/c.txt": "c", ".hidden": "no", ".git/config": "no"})
    found = find_files([str(folder), str(folder / "a.txt"), str(folder / "**/*.txt")])
    assert names(found) == ["a.txt", "b.md", "c.txt"]


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt' does not exist \(seen from"):
        find_files([str(tmp_path / "nowhere.txt")])


def test_a_glob_without_matches_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"glob .*\*\.txt' matches no file"):
        find_files([str(tmp_path / "*.txt")])


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no file"):
        find_files([str(tmp_path)])


def test_text_is_read_exactly(write_files):
    text = "tabs\t, line ends\r\n, no end of line, \u00e4\u4e2d\U0001f600"
    folder = write_files({"a.txt": text})
    assert texts_of(FileCorpus("it", find_files([str(folder)]))) == [text]


def test_order_and_digest_follow_from_content_not_names(write_files, tmp_path):
    first = FileCorpus("first", find_files([str(write_files({"a": "one", "b": "two", "c": "three"}))]))
    other = tmp_path / "other"
    other.mkdir()
    for name, content in {"x": "three", "y": "one", "z": "two"}.items():
        (other / name).write_text(content)
    second = FileCorpus("second", find_files([str(other)]))
    assert texts_of(first) == texts_of(second)
    assert first.content_digest() == second.content_digest()


def test_other_content_has_another_digest(write_files):
    folder = write_files({"a": "one", "b": "two"})
    before = FileCorpus("it", find_files([str(folder)])).content_digest()
    (folder / "b").write_text("twO")
    assert FileCorpus("it", find_files([str(folder)])).content_digest() != before


def test_another_encoding_is_left_out_with_its_name_and_the_count(write_files, caplog):
    folder = write_files({"good.txt": "text", "latin.txt": "caf\u00e9".encode("latin-1")})
    with caplog.at_level(logging.WARNING, "lightning_ptdp"):
        corpus = FileCorpus("it", find_files([str(folder)]))
    assert texts_of(corpus) == ["text"]
    assert "1 of 2 files are left out" in caplog.text
    assert "latin.txt (not UTF-8 at byte 3)" in caplog.text


def test_an_unreadable_file_is_left_out_with_its_name_and_the_reason(write_files, caplog, monkeypatch):
    folder = write_files({"good.txt": "text", "locked.txt": "secret"})
    plain = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied")
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with caplog.at_level(logging.WARNING, "lightning_ptdp"):
        FileCorpus("it", find_files([str(folder)]))
    assert "locked.txt (Permission denied)" in caplog.text


def test_no_readable_file_at_all_is_an_error_with_names_and_numbers(write_files):
    folder = write_files({"a.bin": b"\xff\xfe", "b.txt": "", "c.txt": ""})
    with pytest.raises(ValueError, match=r"of the 3 of mine, 2 are empty and 1 cannot be read: .*a\.bin \(not UTF-8"):
        FileCorpus("mine", find_files([str(folder)]))


def test_only_empty_files_are_an_error(write_files):
    with pytest.raises(ValueError, match="of the 1 of mine, 1 are empty and 0 cannot be read"):
        FileCorpus("mine", find_files([str(write_files({"a.txt": ""}))]))


def test_a_file_that_changes_meanwhile_is_named(write_files):
    folder = write_files({"a.txt": "before"})
    documents = FileCorpus("it", find_files([str(folder)])).documents()
    (folder / "a.txt").write_text("after")
    with pytest.raises(RuntimeError, match=r"a\.txt changed while it was being prepared"):
        read_files(documents.rows[:])


def test_max_documents_takes_a_sample_that_has_both_splits(write_files):
    folder = write_files({f"{number}.txt": f"text {number}" for number in range(200)})
    documents = FileCorpus("it", find_files([str(folder)]), max_documents=100).documents()
    held_out = sum(int.from_bytes(each[:8], "big") < 0.5 * 2**64 for each in documents.digests)
    assert len(documents.digests) == 100
    assert 20 < held_out < 80  # six deviations of 100 draws at 0.5
