"""A datasets folder as a corpus; a wrong column is answered with the right ones."""

import datasets
import pytest

from lightning_ptdp.data import DatasetCorpus, open_dataset

ROWS = {"text": ["one", "two", "", None, "five"], "number": [1, 2, 3, 4, 5]}


@pytest.fixture
def saved(tmp_path) -> str:
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


@pytest.fixture
def saved_splits(tmp_path) -> str:
    rows = datasets.Dataset.from_dict(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    return str(tmp_path / "splits")


def corpus_of(folder: str, **options) -> DatasetCorpus:
    return DatasetCorpus(folder, open_dataset(folder, config=None, split="train"), **{"text_column": "text", **options})


def test_a_saved_dataset_gives_its_texts_and_sizes(saved):
    documents = corpus_of(saved).documents()
    assert documents.read(documents.rows[:]) == ["one", "two", "", "", "five"]
    assert documents.num_bytes == [3, 3, 0, 0, 4]


def test_a_split_of_a_saved_dict_is_found(saved_splits):
    assert len(corpus_of(saved_splits).documents().rows) == 5


def test_a_missing_split_is_answered_with_the_splits(saved_splits):
    with pytest.raises(ValueError, match="has no split 'dev'; it has test, train"):
        open_dataset(saved_splits, config=None, split="dev")


def test_a_missing_column_is_answered_with_the_columns(saved):
    with pytest.raises(ValueError, match=r"no column 'body'; its columns are: text \(string\), number \(int64\)"):
        corpus_of(saved, text_column="body")


def test_a_column_of_numbers_is_refused(saved):
    with pytest.raises(ValueError, match=r"column 'number' of dataset .* holds int64"):
        corpus_of(saved, text_column="number")


def test_a_dataset_without_rows_is_refused():
    with pytest.raises(ValueError, match="dataset 'none' has 0 rows"):
        DatasetCorpus("none", datasets.Dataset.from_dict({"text": ["x"]}).select([]), text_column="text")


def test_what_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"a folder written by save_to_disk; '.*empty' .*cannot be loaded"):
        open_dataset(str(tmp_path / "empty"), config=None, split="train")


def test_the_digest_follows_from_the_texts(saved):
    rows = datasets.Dataset.from_dict(ROWS)
    assert corpus_of(saved).content_digest() == DatasetCorpus("it", rows, text_column="text").content_digest()


def test_the_digest_tells_where_documents_end():
    one, other = (datasets.Dataset.from_dict({"text": texts}) for texts in (["ab", "c"], ["a", "bc"]))
    digests = {DatasetCorpus("it", rows, text_column="text").content_digest() for rows in (one, other)}
    assert len(digests) == 2


def test_max_documents_changes_the_digest(saved):
    assert corpus_of(saved, max_documents=2).content_digest() != corpus_of(saved).content_digest()
    assert len(corpus_of(saved, max_documents=2).documents().rows) == 2
