"""Under its final name a folder is whole, whatever was killed."""

import os

import pytest

from lightning_ptdp.data.store import remove_stale, write_text_at_once, written_aside


def entries(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_appears_at_the_end(tmp_path):
    with written_aside(tmp_path / "target") as folder:
        (folder / "part").write_text("x")
        assert not (tmp_path / "target").exists()
    assert entries(tmp_path) == ["target"]
    assert entries(tmp_path / "target") == ["part"]


def test_a_block_that_raises_leaves_nothing(tmp_path):
    def fail() -> None:
        with written_aside(tmp_path / "target") as folder:
            (folder / "part").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert entries(tmp_path) == []


def test_the_first_to_finish_wins(tmp_path):
    with written_aside(tmp_path / "target") as slow:
        (slow / "by").write_text("slow")
        with written_aside(tmp_path / "target") as quick:
            (quick / "by").write_text("quick")
    assert (tmp_path / "target" / "by").read_text() == "quick"
    assert entries(tmp_path) == ["target"]


def test_what_a_kill_leaves_has_another_name_and_is_removed_when_old(tmp_path):
    killed = written_aside(tmp_path / "target")
    folder = killed.__enter__()
    (folder / "part").write_text("half")
    assert not (tmp_path / "target").exists()
    remove_stale(tmp_path)
    assert folder.exists()
    for path in (folder / "part", folder):
        os.utime(path, (0, 0))
    remove_stale(tmp_path)
    assert entries(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"file cannot be written .*cache_dir="), written_aside(tmp_path / "file/x"):
        pass


def test_a_small_file_is_replaced_whole(tmp_path):
    for text in ("old", "new"):
        write_text_at_once(tmp_path / "deep" / "name", text)
    assert (tmp_path / "deep" / "name").read_text() == "new"
    assert entries(tmp_path / "deep") == ["name"]
