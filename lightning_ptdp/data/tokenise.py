"""Turns documents into token numbers in memory-mapped Arrow files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .corpus import Documents
from .tokenizer import end_of_text

TOKENS = "tokens"  # the Arrow column

_PIECE_CHARS = 2**18  # bounds the memory of encoding, and lets one long document keep all cores busy
_DOCUMENTS_AT_ONCE = 256


def tokenise(documents: Documents, rows: Sequence[int], tokenizer: Tokenizer, folder: Path, *, title: str) -> None:
    """Encode the chosen rows and write them to `folder`, one Arrow row a document, each closed by the end of text.

    All cores encode, as threads of the `tokenizers` library: worker processes would outlive a killed parent.

    Args:
        documents: what to read.
        rows: which of them, in this order.
        tokenizer: has the end of text.
        folder: gets tokens.arrow; must exist.
        title: names the progress bar.
    """
    chosen = documents.rows.select(rows)

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[NDArray[Any]]]:
        return {TOKENS: encode_documents(tokenizer, documents.read(batch))}

    dtype = token_dtype(tokenizer.get_vocab_size())
    chosen.map(
        encode,
        batched=True,
        batch_size=_DOCUMENTS_AT_ONCE,
        remove_columns=chosen.column_names,
        features=datasets.Features({TOKENS: datasets.Sequence(datasets.Value(str(dtype)))}),
        cache_file_name=str(folder / "tokens.arrow"),
        new_fingerprint="tokens",
        desc=title,
    )


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[Any]]:
    """Encode texts: for each an array of token numbers, closed by the end of text.

    Text that spells a special token stays text. Long texts are encoded in pieces, so that a line that ends a piece may
    be cut into other tokens than in one go; decoding gives the same text either way.
    """
    tokenizer.encode_special_tokens = True
    pieces = [cut_into_pieces(text, _PIECE_CHARS) for text in texts]
    encodings = iter(
        tokenizer.encode_batch_fast([piece for each in pieces for piece in each], add_special_tokens=False)
    )
    close, dtype = [end_of_text(tokenizer)], token_dtype(tokenizer.get_vocab_size())
    return [
        np.concatenate([np.asarray(next(encodings).ids, dtype) for _ in each] + [np.asarray(close, dtype)])
        for each in pieces
    ]


def cut_into_pieces(text: str, limit: int) -> list[str]:
    """Cut a text after line ends into pieces of at most `limit` characters; a longer line is cut anywhere."""
    pieces, start = [], 0
    while start < len(text):
        stop = start + limit
        if stop < len(text):
            line_end = text.rfind("\n", start, stop)
            stop = stop if line_end < 0 else line_end + 1
        pieces.append(text[start:stop])
        start = stop
    return pieces


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose the smallest type that holds every token number."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)
