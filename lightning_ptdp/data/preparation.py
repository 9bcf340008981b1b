"""Prepares a corpus, step by step: name its content, look in the cache, split, train the tokenizer, tokenise."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer

from .corpus import Corpus, Documents, mib
from .pack import TokenStream, open_stream
from .split import rows_with_text, split_documents
from .store import remove_stale, written_aside
from .tokenise import tokenise
from .tokenizer import check_vocab_size, load_tokenizer, train_tokenizer

FORMAT = 1  # part of every cache key: raise it whenever the same content must be prepared anew

_TOKENIZER_BYTES = 2**28  # text that a tokenizer is trained on, at most: its memory and time grow with it
_SUMMARY = "summary.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareOptions:
    """What, besides the content, decides how a corpus is prepared.

    Attributes:
        val_fraction: the part of the documents to hold out, at least 0 and less than 1.
        vocab_size: tokens of the tokenizer to train.
        tokenizer: an existing tokenizer.json to use instead.

    Raises:
        ValueError: an option is out of range, or the tokenizer cannot be used.
    """

    val_fraction: float
    vocab_size: int
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(
                f"val_fraction is a part of the documents, at least 0 and less than 1; got {self.val_fraction}"
            )
        if self.tokenizer is None:
            check_vocab_size(self.vocab_size)
        else:
            load_tokenizer(self.tokenizer)


@dataclass(frozen=True)
class Part:
    """The size of one split: its documents, their tokens (ends of text included) and their UTF-8 bytes."""

    num_documents: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus on disk.

    Attributes:
        folder: holds tokenizer.json, train/*.arrow, validation/*.arrow and summary.json.
        vocab_size: tokens of the tokenizer.
        train: size of the training split.
        validation: size of the held-out split.
    """

    folder: Path
    vocab_size: int
    train: Part
    validation: Part

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def stream(self, split: str) -> TokenStream:
        """Open the tokens of "train" or "validation".

        Raises:
            RuntimeError: the files are not those that were written.
        """
        stream, part = open_stream(self.folder / split), {"train": self.train, "validation": self.validation}[split]
        if len(stream) != part.num_tokens:
            raise RuntimeError(
                f"{self.folder / split} holds {len(stream)} tokens where {part.num_tokens} were written; "
                "files are missing or damaged: delete the folder, it will be made anew"
            )
        return stream


def prepare(
    corpus: Corpus,
    validation: Corpus | None,
    options: PrepareOptions,
    *,
    cache: Path,
) -> Prepared:
    """Prepare a corpus, or find it prepared: a cache folder holds equal content under equal options once.

    Args:
        corpus: documents to train on.
        validation: documents to validate on; None holds out a part of `corpus`.
        options: how to prepare them.
        cache: folder that holds prepared corpora; made if missing.

    Raises:
        ValueError: a split has no documents.
        RuntimeError: the cache folder cannot be written.
    """
    target = cache / _key(corpus, validation, options)
    if target.is_dir():
        log.info("prepared: found in %s", target)
        return load_prepared(target)
    remove_stale(cache)
    with written_aside(target) as folder:
        _write(corpus, validation, options, folder=folder)
    log.info("prepared: kept in %s", target)
    return load_prepared(target)


def load_prepared(folder: Path) -> Prepared:
    """Read the summary of a prepared folder.

    Raises:
        RuntimeError: it has none.
    """
    try:
        summary = json.loads((folder / _SUMMARY).read_text())
    except OSError as error:
        raise RuntimeError(f"{folder} is no prepared corpus: {_SUMMARY} is missing; delete the folder") from error
    return Prepared(
        folder=folder,
        vocab_size=summary["vocab_size"],
        train=Part(**summary["train"]),
        validation=Part(**summary["validation"]),
    )


def _key(corpus: Corpus, validation: Corpus | None, options: PrepareOptions) -> str:
    """Hash the content and all that decides how it is prepared: the name of the folder in the cache."""
    held_out = f"fraction {options.val_fraction}" if validation is None else f"content {validation.content_digest()}"
    given = options.tokenizer
    tokens = f"train {options.vocab_size}" if given is None else f"given {blake2b(given.read_bytes()).hexdigest()}"
    facts = [str(FORMAT), corpus.content_digest(), held_out, tokens]
    return blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


def _write(corpus: Corpus, validation: Corpus | None, options: PrepareOptions, *, folder: Path) -> None:
    """Prepare a corpus into an empty folder."""
    documents = corpus.documents()
    if validation is None:
        split = split_documents(documents, options.val_fraction)
        chosen = {"train": (documents, split.train), "validation": (documents, split.validation)}
    else:
        held_out = validation.documents()
        chosen = {"train": (documents, rows_with_text(documents)), "validation": (held_out, rows_with_text(held_out))}
    made = _tokenizer(*chosen["train"], options)
    made.save(str(folder / "tokenizer.json"))
    parts = {name: _write_part(name, *chosen[name], made, folder) for name in chosen}
    summary = {"vocab_size": made.get_vocab_size()}
    (folder / _SUMMARY).write_text(json.dumps(summary | {name: asdict(part) for name, part in parts.items()}, indent=1))


def _tokenizer(documents: Documents, rows: Sequence[int], options: PrepareOptions) -> Tokenizer:
    if options.tokenizer is not None:
        log.info("tokenizer: %s", options.tokenizer)
        return load_tokenizer(options.tokenizer)
    sample = _first_bytes(documents, rows)
    total = mib(sum(documents.num_bytes[row] for row in sample))
    log.info("tokenizer: training %d tokens on %d documents, %s", options.vocab_size, len(sample), total)
    texts = _texts(documents, sample)
    return train_tokenizer(texts, vocab_size=options.vocab_size, show_progress=sys.stderr.isatty())


def _write_part(name: str, documents: Documents, rows: Sequence[int], tokenizer: Tokenizer, folder: Path) -> Part:
    (folder / name).mkdir()
    num_bytes = sum(documents.num_bytes[row] for row in rows)
    if not rows:
        return Part(num_documents=0, num_tokens=0, num_bytes=0)
    log.info("tokenising: %s, %d documents, %s", name, len(rows), mib(num_bytes))
    tokenise(documents, rows, tokenizer, folder / name, title=f"tokenising {name}")
    num_tokens = len(open_stream(folder / name))
    log.info("tokenising: %s, %d tokens, %.2f bytes a token", name, num_tokens, num_bytes / num_tokens)
    return Part(num_documents=len(rows), num_tokens=num_tokens, num_bytes=num_bytes)


def _first_bytes(documents: Documents, rows: Sequence[int]) -> list[int]:
    """Take rows from the first on, up to `_TOKENIZER_BYTES` of text and at least one."""
    sample: list[int] = []
    total = 0
    for row in rows:
        if sample and total + documents.num_bytes[row] > _TOKENIZER_BYTES:
            break
        sample.append(row)
        total += documents.num_bytes[row]
    return sample


def _texts(documents: Documents, rows: Sequence[int]) -> Iterator[str]:
    for batch in documents.rows.select(rows).iter(batch_size=100):
        yield from documents.read(batch)
