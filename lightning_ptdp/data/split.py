"""Decides which documents are held out, by each document's own content."""

from collections.abc import Sequence
from dataclasses import dataclass

from .corpus import Documents


@dataclass(frozen=True)
class Split:
    """Row numbers of the training and of the held-out documents, ascending; empty documents are in neither."""

    train: list[int]
    validation: list[int]


def is_held_out(digest: bytes, val_fraction: float) -> bool:
    """Whether a document belongs to validation: its digest, read as a number in [0, 1), is under the fraction.

    A document's side depends on nothing but its content and the fraction: not on its name, its neighbours or a seed.
    Adding documents moves none, and copies of one document are on the same side.
    """
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def split_documents(documents: Documents, val_fraction: float) -> Split:
    """Split documents into those to train on and those held out, by `is_held_out`.

    Raises:
        ValueError: the training part, or the validation part of a fraction above 0, is empty.
    """
    rows = rows_with_text(documents)
    held_out = [row for row in rows if is_held_out(documents.digests[row], val_fraction)]
    kept = sorted(set(rows).difference(held_out))
    _check(rows, kept, held_out, val_fraction)
    return Split(train=kept, validation=held_out)


def rows_with_text(documents: Documents) -> list[int]:
    """List the rows of all documents that aren't empty, ascending.

    Raises:
        ValueError: there is none.
    """
    rows = [row for row, size in enumerate(documents.num_bytes) if size > 0]
    if not rows:
        raise ValueError(f"a corpus needs at least one document with text; all {len(documents.num_bytes)} are empty")
    return rows


def _check(rows: Sequence[int], kept: Sequence[int], held_out: Sequence[int], val_fraction: float) -> None:
    if not kept or (val_fraction > 0 and not held_out):
        empty = "validation" if kept else "training"
        raise ValueError(
            f"the {empty} split is empty: whole documents are held out by their content, and val_fraction="
            f"{val_fraction} of {len(rows)} documents gave {len(kept)} for training and {len(held_out)} for "
            f"validation; use {'a larger' if kept else 'a smaller'} val_fraction, more documents, documents of your "
            "own for validation (val_paths, val_split), or val_fraction=0 to train without validation"
        )
