"""Documents to token numbers in memory-mapped Arrow files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .corpus import Documents, ReadTexts
from .tokenizer import end_of_text, load_tokenizer

TOKENS = "tokens"  # the Arrow column

_PIECE_CHARS = 2**20  # bounds the memory of encoding: a token costs far more while it is an object
_DOCUMENTS_AT_ONCE = 100
_BYTES_A_PROCESS = 2**22  # starting a process costs about as much as encoding this much text


def tokenise(
    documents: Documents, rows: Sequence[int], tokenizer_path: Path, folder: Path, *, num_proc: int, title: str
) -> None:
    """Encode the chosen rows and write them to `folder`, one Arrow row a document, each closed by the end of text.

    Args:
        documents: what to read.
        rows: which of them, in this order.
        tokenizer_path: a `tokenizer.json`; every process loads it once.
        folder: gets one Arrow file a process; must exist.
        num_proc: processes at most; small corpora use fewer.
        title: names the progress bar.
    """
    num_bytes = sum(documents.num_bytes[row] for row in rows)
    processes = max(1, min(num_proc, len(rows), num_bytes // _BYTES_A_PROCESS))
    chosen = documents.rows.select(rows)
    vocab_size = load_tokenizer(tokenizer_path).get_vocab_size()
    chosen.map(
        Encode(documents.read, tokenizer_path, in_worker=processes > 1),
        batched=True,
        batch_size=_DOCUMENTS_AT_ONCE,
        num_proc=processes if processes > 1 else None,
        remove_columns=chosen.column_names,
        features=datasets.Features({TOKENS: datasets.Sequence(datasets.Value(str(token_dtype(vocab_size))))}),
        cache_file_name=str(folder / "tokens.arrow"),
        new_fingerprint="tokens",
        desc=title,
    )


@dataclass(frozen=True)
class Encode:
    """The function that `datasets` maps over batches of documents."""

    read: ReadTexts
    tokenizer_path: Path
    in_worker: bool

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[NDArray[Any]]]:
        if self.in_worker:  # processes share the cores already; the library's threads would fight over them
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer = _loaded(self.tokenizer_path)
        return {TOKENS: encode_documents(tokenizer, self.read(batch))}


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[Any]]:
    """One array of token numbers a text, closed by the end of text.

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
    """The smallest type that holds every token number."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)


@lru_cache(maxsize=1)
def _loaded(path: Path) -> Tokenizer:
    return load_tokenizer(path)
