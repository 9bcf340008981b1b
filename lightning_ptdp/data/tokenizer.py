"""The tokenizer: byte-level byte-pair encoding, trained on the corpus or brought along."""

import logging
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of text

log = logging.getLogger(__name__)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, show_progress: bool = True) -> Tokenizer:
    """Train a byte-level BPE with the special token `END_OF_TEXT`, which gets number 0.

    Any text can be encoded and comes back exactly: all 256 bytes are in the vocabulary.

    Args:
        texts: documents.
        vocab_size: the number of tokens wanted; text that has fewer pairs to merge gives a smaller one, with a warning.

    Raises:
        ValueError: the vocabulary is too small to hold every byte.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    got = tokenizer.get_vocab_size()
    if got < vocab_size:
        log.warning(
            "tokenizer: the corpus supports %d tokens, fewer than vocab_size=%d; the rest stay unused", got, vocab_size
        )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json` of the `tokenizers` library.

    Raises:
        ValueError: it cannot be read, or lacks the token `END_OF_TEXT`.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer must be a tokenizer.json file; {path} cannot be loaded: {error}") from error
    end_of_text(tokenizer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Look up the number of the token that closes each document.

    Raises:
        ValueError: the vocabulary has no such token.
    """
    number = tokenizer.token_to_id(END_OF_TEXT)
    if number is None:
        raise ValueError(
            f"documents are joined with {END_OF_TEXT!r}, which this tokenizer of {tokenizer.get_vocab_size()} tokens "
            f"lacks; add it with add_special_tokens([{END_OF_TEXT!r}]) and save the tokenizer again"
        )
    return int(number)


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError if not all bytes and the end of text fit."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"a byte-level vocabulary holds 256 bytes and {END_OF_TEXT!r}, so vocab_size must be at least "
            f"{SMALLEST_VOCABULARY}; got {vocab_size}"
        )
