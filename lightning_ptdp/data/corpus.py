"""What a corpus is: documents, and a digest of their content that names everything prepared from them."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 16

Rows = Any  # a datasets.Dataset; the library ships no types
ReadTexts = Callable[[dict[str, list[Any]]], list[str]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Documents:
    """The documents of a corpus, ready to be read in batches.

    Attributes:
        rows: a `datasets.Dataset`, one row a document.
        read: turns a batch of rows (column name -> values) into one text a row.
        digests: for each row, `digest` of the document's UTF-8 bytes.
        num_bytes: for each row, the length of the document in UTF-8; 0 is an empty document.
    """

    rows: Rows
    read: ReadTexts
    digests: Sequence[bytes]
    num_bytes: Sequence[int]


class Corpus(ABC):
    """A source of documents. Opening one reads what is needed to name its content, and no more."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the corpus in messages."""

    @abstractmethod
    def content_digest(self) -> str:
        """A hash of the content alone, hexadecimal: where the content lies and what it is called doesn't matter."""

    @abstractmethod
    def documents(self) -> Documents:
        """All documents, in an order that is the same whenever `content_digest` is."""


def digest(content: bytes) -> bytes:
    """Hash the content of one document; `DIGEST_BYTES` long."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def mib(num_bytes: int) -> str:
    """Write a size for a message, in units of 2^20 bytes."""
    return f"{num_bytes / 2**20:.1f} MiB"
