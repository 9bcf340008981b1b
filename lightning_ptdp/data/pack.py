"""Tokens to sequences: a stream over memory-mapped files, and fixed windows on it.

stream    d1 d1 d1 E d2 d2 E d3 d3 d3 d3 E           E: end of text, closes each document
labels    d1 d1 d1 E | d2 d2 E d3 | d3 d3 d3 E       every token is a target exactly once
inputs    E d1 d1 d1 | E d2 d2 E  | d3 d3 d3 d3      the token before each target; the first follows an E
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from .tokenise import TOKENS

IGNORED = -100  # the label that F.cross_entropy leaves out by default


class TokenStream:
    """The tokens of all documents of a folder end to end, memory-mapped; sliced like an array.

    Args:
        chunks: arrays of token numbers, in order.
        folder: where they come from; a process that is sent the stream maps it again instead of getting a copy.
    """

    def __init__(self, chunks: Sequence[NDArray[Any]], *, folder: Path | None = None) -> None:
        self._folder = folder
        self._chunks = [chunk for chunk in chunks if len(chunk)]
        self._starts = np.array([0, *accumulate(len(chunk) for chunk in self._chunks)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return (TokenStream, (self._chunks,)) if self._folder is None else (open_stream, (self._folder,))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop` (excluded), clipped to the stream as a slice is; a copy, int64."""
        start, stop = max(start, 0), min(stop, len(self))
        parts = []
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            base, end = int(self._starts[number]), int(self._starts[number + 1])
            parts.append(self._chunks[number][start - base : min(stop, end) - base])
            start, number = end, number + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def open_stream(folder: Path) -> TokenStream:
    """Open a folder that `tokenise` wrote as one stream."""
    chunks: list[NDArray[Any]] = []
    for file in sorted(folder.glob("*.arrow")):
        column = datasets.Dataset.from_file(str(file)).data.column(TOKENS)
        chunks.extend(chunk.flatten().to_numpy(zero_copy_only=True) for chunk in column.chunks)
    return TokenStream(chunks, folder=folder)


class PackedSequences(Dataset[dict[str, NDArray[np.int64]]]):
    """Windows of `seq_len` tokens on a stream, without loss: window i predicts tokens i * s to (i + 1) * s of it.

    Every token of the stream is a label exactly once. The last window is filled up: its inputs with the end of text,
    its labels with `IGNORED`.

    Args:
        stream: documents, each closed by the end of text.
        seq_len: s, tokens in a window.
        end_of_text: its token number.
    """

    def __init__(self, stream: TokenStream, *, seq_len: int, end_of_text: int) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._end_of_text = end_of_text

    def __len__(self) -> int:
        return num_sequences(len(self._stream), self._seq_len)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Window `index`: "input_ids" and "labels", [s] int64 each."""
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} sequences; got index {index}")
        start = index * self._seq_len
        labels = self._stream.read(start, start + self._seq_len)
        before = self._stream.read(start - 1, start) if start else np.array([self._end_of_text])
        missing = self._seq_len - len(labels)
        return {
            "input_ids": np.concatenate([before, labels[:-1], np.full(missing, self._end_of_text)]),
            "labels": np.concatenate([labels, np.full(missing, IGNORED)]),
        }


def num_sequences(num_tokens: int, seq_len: int) -> int:
    """Count the windows that hold every token once; the last may be partly filled."""
    return -(-num_tokens // seq_len)
