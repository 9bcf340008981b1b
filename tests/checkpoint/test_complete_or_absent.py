"""A checkpoint folder is whole, or it is not there."""

import os

import pytest

from lightning_ptdp.checkpoint import complete_or_absent as store
from lightning_ptdp.checkpoint.checked_files import checksums_of


def written(path, text="one"):
    folder = store.prepare(path)
    (folder / "shard").write_text(text)
    return {"shard": checksums_of(folder / "shard")}


def test_nothing_has_the_name_until_all_is_written(tmp_path):
    path = tmp_path / "step=2.ckpt"
    checksums = written(path)
    assert not path.exists()
    store.commit(path, checksums)
    assert (path / "shard").read_text() == "one"
    assert os.listdir(tmp_path) == ["step=2.ckpt"]
    assert [file.damage() for file in store.files(path)] == [None]


def test_one_that_is_replaced_stays_until_then(tmp_path):
    path = tmp_path / "last.ckpt"
    store.commit(path, written(path))
    checksums = written(path, "two")
    assert (path / "shard").read_text() == "one"
    store.commit(path, checksums)
    assert (path / "shard").read_text() == "two"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_file_of_the_same_name_is_replaced(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_text("an ordinary checkpoint")
    store.commit(path, written(path))
    assert (path / "shard").exists()


def test_replacement_that_was_cut_off_is_undone(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    store.commit(path, written(path))
    checksums = written(path, "two")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        store.commit(path, checksums)
    monkeypatch.undo()
    assert not path.exists()
    store.recover(path)
    assert (path / "shard").read_text() == "one"


def test_attempts_that_were_cut_off_are_found_and_replaced(tmp_path):
    written(tmp_path / "step=2.ckpt", "half")
    (found,) = store.cut_off(tmp_path)
    assert found.name == ".step=2.ckpt.unfinished"
    store.commit(tmp_path / "step=2.ckpt", written(tmp_path / "step=2.ckpt", "whole"))
    assert store.cut_off(tmp_path) == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_text("on"), "has 2 bytes, and was written with 3"),
        (lambda file: file.write_text("two"), "has other contents than were written"),
    ],
)
def test_damage_names_the_file(tmp_path, spoil, says):
    path = tmp_path / "last.ckpt"
    store.commit(path, written(path))
    spoil(path / "shard")
    (text,) = [file.damage() for file in store.files(path)]
    assert str(path / "shard") in text
    assert says in text


def test_removing_leaves_nothing(tmp_path):
    path, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    store.commit(path, written(path))
    link.symlink_to(path)
    store.remove(link)
    assert path.exists()
    store.remove(path)
    store.remove(path)
    assert os.listdir(tmp_path) == []
