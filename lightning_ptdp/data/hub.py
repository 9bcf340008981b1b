"""A Hugging Face dataset as a corpus: one row is one document."""

import logging
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets

from lightning_ptdp.names import first_few

from .corpus import Corpus, Documents, Rows, digest

_ROWS_AT_ONCE = 1000

log = logging.getLogger(__name__)


class DatasetCorpus(Corpus):
    """The text column of a `datasets.Dataset`, one document a row, in the order of the rows.

    Empty rows are left out.

    Raises:
        ValueError: there is no such column, it holds no strings, or the dataset has no rows.
    """

    def __init__(self, name: str, rows: Rows, *, text_column: str, max_documents: int | None = None) -> None:
        _check_column(name, rows, text_column)
        if len(rows) == 0:
            raise ValueError(f"a corpus needs at least one document; dataset {name!r} has 0 rows")
        rows = rows.select_columns([text_column])
        self._name = name
        self._column = text_column
        self._rows = rows if max_documents is None else rows.select(range(min(max_documents, len(rows))))
        log.info("corpus: %s, %d rows, text in column %r", name, len(self._rows), text_column)

    @property
    def name(self) -> str:
        return self._name

    def content_digest(self) -> str:
        total = blake2b(digest_size=32)
        for batch in self._rows.iter(batch_size=_ROWS_AT_ONCE):
            contents = [text.encode() for text in read_column(batch, column=self._column)]
            total.update(repr([len(content) for content in contents]).encode())
            total.update(b"".join(contents))
        return total.hexdigest()

    def documents(self) -> Documents:
        facts = self._rows.map(
            partial(_facts, column=self._column),
            batched=True,
            remove_columns=[self._column],
            features=datasets.Features({"digest": datasets.Value("binary"), "num_bytes": datasets.Value("int64")}),
            keep_in_memory=True,
            new_fingerprint="facts",
            desc="reading rows",
        )
        return Documents(
            rows=self._rows,
            read=partial(read_column, column=self._column),
            digests=list(facts["digest"]),
            num_bytes=list(facts["num_bytes"]),
        )


def read_column(batch: dict[str, list[Any]], *, column: str) -> list[str]:
    """The texts of a batch of rows; a missing value is an empty text."""
    return [text or "" for text in batch[column]]


def open_dataset(name: str, *, config: str | None, split: str) -> Rows:
    """A dataset of the Hugging Face Hub by name, or a folder that `save_to_disk` wrote.

    Raises:
        ValueError: it cannot be loaded, or has no such split.
    """
    folder = Path(name).expanduser()
    if (folder / "dataset_dict.json").is_file():
        return _pick_split(name, datasets.load_from_disk(str(folder)), split)
    if (folder / "state.json").is_file():
        return datasets.load_from_disk(str(folder))
    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"dataset must be a name on the Hugging Face Hub or a folder written by save_to_disk; {name!r} "
            f"(config={config!r}, split={split!r}) cannot be loaded: {error}"
        ) from error


def _pick_split(name: str, splits: Any, split: str) -> Rows:
    if split not in splits:
        raise ValueError(f"dataset {name!r} has no split {split!r}; it has {first_few(sorted(splits), 3)}")
    return splits[split]


def _check_column(name: str, rows: Rows, text_column: str) -> None:
    kinds = {column: getattr(feature, "dtype", type(feature).__name__) for column, feature in rows.features.items()}
    listed = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
    if text_column not in kinds:
        raise ValueError(
            f"dataset {name!r} has no column {text_column!r}; its columns are: {listed}; "
            "choose one that holds the text with text_column="
        )
    if kinds[text_column] not in {"string", "large_string"}:
        raise ValueError(
            f"text_column must hold strings; column {text_column!r} of dataset {name!r} holds {kinds[text_column]}; "
            f"its columns are: {listed}"
        )


def _facts(batch: dict[str, list[Any]], *, column: str) -> dict[str, list[Any]]:
    contents = [text.encode() for text in read_column(batch, column=column)]
    return {"digest": [digest(content) for content in contents], "num_bytes": [len(content) for content in contents]}
