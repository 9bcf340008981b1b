"""The default corpus is there on every whole Python, and its absence is explained."""

import pytest

from lightning_ptdp.data import standard_library_files


def test_it_has_hundreds_of_sources_and_no_tests():
    files = standard_library_files()
    assert len(files) > 400
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(file.parts[-4:-1]) for file in files)


def test_a_stripped_library_is_named_with_what_it_holds(tmp_path):
    (tmp_path / "os.py").write_text("")
    for number in range(7):
        (tmp_path / f"module{number}.pyc").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{tmp_path} holds 1 of them \(and 7 \.pyc\).*paths="):
        standard_library_files(tmp_path)


def test_a_zipped_library_is_named(tmp_path):
    (tmp_path / "python313.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is no folder \(beside it lies python313\.zip\)"):
        standard_library_files(tmp_path / "python3.13")
