"""What is held out follows from each document's content alone."""

import datasets
import pytest

from lightning_ptdp.data import Documents, is_held_out
from lightning_ptdp.data.corpus import digest
from lightning_ptdp.data.split import split_documents


def documents_of(texts: list[str]) -> Documents:
    contents = [text.encode() for text in texts]
    return Documents(
        rows=datasets.Dataset.from_dict({"text": texts}),
        read=lambda batch: batch["text"],
        digests=[digest(content) for content in contents],
        num_bytes=[len(content) for content in contents],
    )


TEXTS = [f"document {number}" for number in range(200)]


def held_out_texts(texts: list[str], val_fraction: float) -> set[str]:
    return {texts[row] for row in split_documents(documents_of(texts), val_fraction).validation}


def test_the_order_of_documents_does_not_matter():
    assert held_out_texts(TEXTS, 0.2) == held_out_texts(TEXTS[::-1], 0.2)


def test_more_documents_move_none():
    assert held_out_texts(TEXTS[:100], 0.2) <= held_out_texts(TEXTS, 0.2)


def test_a_larger_fraction_keeps_what_was_held_out():
    assert held_out_texts(TEXTS, 0.1) < held_out_texts(TEXTS, 0.3)


def test_copies_are_on_one_side():
    split = split_documents(documents_of(TEXTS * 2), 0.2)
    assert sorted(row % 200 for row in split.validation) == sorted([row for row in split.validation if row < 200] * 2)


def test_splits_are_disjoint_and_whole():
    split = split_documents(documents_of(TEXTS), 0.2)
    assert sorted(split.train + split.validation) == list(range(200))


def test_the_share_is_about_the_fraction():
    share = sum(is_held_out(digest(str(number).encode()), 0.1) for number in range(10_000)) / 10_000
    assert share == pytest.approx(0.1, abs=0.012)  # four deviations of 10,000 draws at 0.1


def test_empty_documents_are_in_neither_split():
    split = split_documents(documents_of(["", *TEXTS]), 0.2)
    assert 0 not in split.train + split.validation


def test_an_empty_validation_split_is_named():
    with pytest.raises(ValueError, match=r"validation split is empty.*val_fraction=0.0001 of 5 documents gave 5"):
        split_documents(documents_of(TEXTS[:5]), 0.0001)


def test_an_empty_training_split_is_named():
    with pytest.raises(ValueError, match=r"training split is empty.*a smaller val_fraction"):
        split_documents(documents_of(TEXTS[:5]), 0.9999)


def test_no_validation_can_be_asked_for():
    assert split_documents(documents_of(TEXTS[:5]), 0.0).validation == []


def test_only_empty_documents_are_an_error():
    with pytest.raises(ValueError, match="all 2 are empty"):
        split_documents(documents_of(["", ""]), 0.5)
