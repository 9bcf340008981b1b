"""The tokenizer encodes any text and gives it back."""

import logging

import pytest
from tokenizers import Tokenizer, models

from lightning_ptdp.data import END_OF_TEXT, load_tokenizer, train_tokenizer
from lightning_ptdp.data.tokenise import cut_into_pieces, encode_documents, token_dtype

TEXTS = ["def main(argument): return argument\n" * 5, "class Main: pass\n" * 5]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=280, show_progress=False)


@pytest.mark.parametrize("text", ["", "plain", "  tabs\t\r\n\n", "\u00e4\u4e2d\U0001f600", "\x00\x7f", TEXTS[0]])
def test_any_text_comes_back_exactly(tokenizer, text):
    (ids,) = encode_documents(tokenizer, [text])
    assert tokenizer.decode(ids[:-1].tolist()) == text


def test_each_document_is_closed_by_the_end_of_text(tokenizer):
    for ids in encode_documents(tokenizer, [*TEXTS, ""]):
        assert ids[-1] == tokenizer.token_to_id(END_OF_TEXT) == 0
        assert (ids[:-1] != 0).all()


def test_text_that_spells_a_special_token_stays_text(tokenizer):
    (ids,) = encode_documents(tokenizer, [f"a{END_OF_TEXT}b"])
    assert (ids[:-1] != 0).all()
    assert tokenizer.decode(ids[:-1].tolist()) == f"a{END_OF_TEXT}b"


def test_the_vocabulary_has_the_size_asked_for(tokenizer):
    assert tokenizer.get_vocab_size() == 280


def test_a_vocabulary_that_the_text_cannot_fill_is_told(caplog):
    with caplog.at_level(logging.WARNING, "lightning_ptdp"):
        got = train_tokenizer(["ab ab"], vocab_size=5000, show_progress=False).get_vocab_size()
    assert got < 300
    assert f"the corpus supports {got} tokens, fewer than vocab_size=5000" in caplog.text


def test_a_vocabulary_without_all_bytes_is_refused():
    with pytest.raises(ValueError, match="must be at least 257; got 256"):
        train_tokenizer(TEXTS, vocab_size=256)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be loaded"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="which this tokenizer of 0 tokens lacks"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
def test_pieces_make_up_the_text(limit):
    text = "one\ntwo\n\nthree and four\n"
    pieces = cut_into_pieces(text, limit)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)


def test_pieces_end_with_lines_where_lines_are_short_enough():
    assert cut_into_pieces("one\ntwo\nthree", 8) == ["one\ntwo\n", "three"]


def test_token_numbers_take_two_bytes_while_they_fit():
    assert [token_dtype(size).itemsize for size in (2**16, 2**16 + 1)] == [2, 4]
