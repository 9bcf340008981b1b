"""Text to packed token sequences: corpora, a byte-level tokenizer, memory-mapped streams, a LightningDataModule."""

from .corpus import Corpus, Documents
from .datamodule import TextDataModule
from .files import FileCorpus, find_files
from .hub import DatasetCorpus, open_dataset
from .pack import IGNORED, PackedSequences, TokenStream, num_sequences, open_stream
from .preparation import Prepared, PrepareOptions, load_prepared, prepare
from .split import is_held_out
from .standard_library import standard_library_files
from .tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer

__all__ = [
    "TextDataModule",
    "Corpus",
    "Documents",
    "FileCorpus",
    "DatasetCorpus",
    "standard_library_files",
    "find_files",
    "open_dataset",
    "prepare",
    "PrepareOptions",
    "Prepared",
    "load_prepared",
    "is_held_out",
    "END_OF_TEXT",
    "train_tokenizer",
    "load_tokenizer",
    "TokenStream",
    "open_stream",
    "PackedSequences",
    "num_sequences",
    "IGNORED",
]
