"""Packing loses no token, wherever sequences, chunks and the end of the stream fall."""

import numpy as np
import pytest

from lightning_ptdp.data import IGNORED, PackedSequences, TokenStream, num_sequences

END = 0


def stream_of(num_tokens: int, chunk: int) -> TokenStream:
    tokens = np.arange(1, num_tokens + 1, dtype=np.uint16)
    return TokenStream([tokens[start : start + chunk] for start in range(0, num_tokens, chunk)])


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 31, 64])
@pytest.mark.parametrize("seq_len", [1, 2, 3, 8, 64, 100])
@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
def test_each_token_is_a_label_exactly_once(num_tokens, seq_len, chunk):
    sequences = PackedSequences(stream_of(num_tokens, chunk), seq_len=seq_len, end_of_text=END)
    labels = np.concatenate([sequences[index]["labels"] for index in range(len(sequences))])
    assert labels[labels != IGNORED].tolist() == list(range(1, num_tokens + 1))


@pytest.mark.parametrize("seq_len", [1, 2, 3, 8])
def test_inputs_are_the_tokens_before_the_labels(seq_len):
    sequences = PackedSequences(stream_of(20, 7), seq_len=seq_len, end_of_text=END)
    for index in range(len(sequences)):
        inputs, labels = sequences[index]["input_ids"], sequences[index]["labels"]
        real = labels != IGNORED
        assert (inputs[real] == labels[real] - 1).all()


def test_a_window_looks_like_this():
    sequences = PackedSequences(stream_of(7, 3), seq_len=4, end_of_text=END)
    assert [sequences[index]["input_ids"].tolist() for index in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 0]]
    assert [sequences[index]["labels"].tolist() for index in range(2)] == [[1, 2, 3, 4], [5, 6, 7, -100]]


def test_windows_are_int64_and_of_one_length():
    sequences = PackedSequences(stream_of(10, 4), seq_len=4, end_of_text=END)
    for index in range(len(sequences)):
        for part in sequences[index].values():
            assert part.shape == (4,)
            assert part.dtype == np.int64


def test_number_of_sequences_counts_the_last_partial_one():
    assert [num_sequences(tokens, 4) for tokens in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_an_index_outside_is_refused():
    sequences = PackedSequences(stream_of(10, 4), seq_len=4, end_of_text=END)
    with pytest.raises(IndexError, match="there are 3 sequences; got index 3"):
        sequences[3]


def test_a_stream_reads_like_an_array():
    stream = stream_of(10, 4)
    assert len(stream) == 10
    assert stream.read(2, 9).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert stream.read(8, 99).tolist() == [9, 10]
    assert stream.read(10, 12).tolist() == []


def test_an_empty_stream_has_no_sequences():
    assert len(PackedSequences(TokenStream([]), seq_len=4, end_of_text=END)) == 0
