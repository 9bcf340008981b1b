"""TextDataModule, which gives any text to an ordinary Trainer as packed token sequences."""

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from .corpus import Corpus
from .files import FileCorpus, find_files
from .hub import DatasetCorpus, open_dataset
from .pack import PackedSequences
from .preparation import Prepared, PrepareOptions, load_prepared, prepare
from .standard_library import standard_library_files
from .store import write_text_at_once
from .tokenizer import end_of_text, load_tokenizer

DEFAULT_CACHE = Path("~/.cache/lightning_ptdp/data")

log = logging.getLogger(__name__)


class TextDataModule(L.LightningDataModule):
    """Turns text into batches of packed token sequences.

    The text is the source of Python's standard library, or files of your own (`paths`), or a Hugging Face dataset
    (`dataset`). A batch is a dict of "input_ids" and "labels", [b, s] int64 each: labels are the tokens that follow
    the inputs, and -100 where the last sequence of a split is filled up.

    Args:
        paths: your own text: files, folders (searched to the bottom) or globs; a file is a document.
        val_paths: files, folders or globs to validate on; all of `paths` is then trained on.
        dataset: a dataset on the Hugging Face Hub by name, or a folder that `save_to_disk` wrote; a row is a document.
        dataset_config: the configuration of that dataset, where it has several.
        split: the split of the dataset to train on.
        val_split: the split to validate on; all of `split` is then trained on.
        text_column: the column of the dataset that holds the text.
        max_documents: use only so many documents.
        tokenizer: an existing tokenizer.json to use; by default one is trained on the corpus.
        vocab_size: tokens of the tokenizer that is trained.
        seq_len: tokens in a sequence, s.
        batch_size: sequences in a batch of one replica, b.
        val_fraction: the part of the documents held out for validation, chosen by their content.
        num_workers: processes that load batches; 0 is right for nearly all, as a batch is a copy out of mapped memory.
        cache_dir: where prepared corpora are kept; ~/.cache/lightning_ptdp/data by default.
        seed: seed of the order in which training sequences come.
    """

    def __init__(
        self,
        *,
        paths: list[str] | str | None = None,
        val_paths: list[str] | str | None = None,
        dataset: str | None = None,
        dataset_config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        text_column: str = "text",
        max_documents: int | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 8192,
        seq_len: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.paths, self.val_paths = _as_list(paths), _as_list(val_paths)
        self.dataset, self.dataset_config, self.split, self.val_split = dataset, dataset_config, split, val_split
        self.text_column, self.max_documents = text_column, max_documents
        self.tokenizer_path = None if tokenizer is None else Path(tokenizer).expanduser()
        self.vocab_size, self.seq_len, self.batch_size = vocab_size, seq_len, batch_size
        self.val_fraction, self.num_workers, self.seed = val_fraction, num_workers, seed
        self.cache = (DEFAULT_CACHE if cache_dir is None else Path(cache_dir)).expanduser().absolute()
        self._prepared: Prepared | None = None
        self._check_options()

    @property
    def source(self) -> str:
        """Where the text comes from, for messages."""
        if self.dataset is not None:
            return f"{self.dataset} ({self.split})"
        return "the Python standard library" if self.paths is None else f"paths={self.paths}"

    @property
    def prepared(self) -> Prepared:
        """What `setup` found prepared: folder, documents, tokens and bytes of each split."""
        if self._prepared is None:
            raise RuntimeError("the corpus is known once prepare_data() and setup() have run")
        return self._prepared

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the prepared corpus."""
        return load_tokenizer(self.prepared.tokenizer_path)

    def prepare_data(self) -> None:
        """Prepare the corpus if its content is new. Lightning calls this in one process a node."""
        prepared = prepare(
            self._corpus(),
            self._validation_corpus(),
            self._options(),
            cache=self.cache,
        )
        write_text_at_once(self._pointer(), prepared.folder.name)

    def setup(self, stage: str | None = None) -> None:
        """Open what `prepare_data` made on this node.

        Raises:
            RuntimeError: nothing is there.
            ValueError: the training split is shorter than one sequence.
        """
        try:
            name = self._pointer().read_text()
        except OSError as error:
            raise RuntimeError(
                f"no prepared corpus for these options in {self.cache}: prepare_data() has to run on every node that "
                "doesn't share this folder (prepare_data_per_node=True)"
            ) from error
        self._prepared = load_prepared(self.cache / name)
        self._check_lengths(self._prepared)

    def train_dataloader(self) -> DataLoader[Any]:
        """Load shuffled batches of the training split.

        `seed` and the epoch set the order of all sequences, whatever the number of replicas, which take turns.
        """
        sequences = self._sequences("train")
        replicas = getattr(self.trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        return self._loader(sequences, sampler=DistributedSampler(sequences, **replicas, seed=self.seed))

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Load batches of the held-out documents in a fixed order; no loader if none are held out."""
        return self._loader(self._sequences("validation")) if self.prepared.validation.num_tokens else []

    def state_dict(self) -> dict[str, Any]:
        """Put the tokenizer into each checkpoint, so that a checkpoint alone can turn text into tokens and back."""
        return {"tokenizer": self.prepared.tokenizer_path.read_text()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warn if the checkpoint was trained with another tokenizer than the one in use."""
        if self._prepared is not None and state_dict["tokenizer"] != self._prepared.tokenizer_path.read_text():
            log.warning(
                "the checkpoint was trained with another tokenizer than %s: token numbers mean other text; "
                "save its own to a file and pass that as tokenizer=",
                self._prepared.tokenizer_path,
            )

    def _options(self) -> PrepareOptions:
        return PrepareOptions(val_fraction=self.val_fraction, vocab_size=self.vocab_size, tokenizer=self.tokenizer_path)

    def _corpus(self) -> Corpus:
        if self.dataset is not None:
            return self._rows_of(self.split)
        if self.paths is not None:
            return FileCorpus(self.source, find_files(self.paths), max_documents=self.max_documents)
        return FileCorpus(self.source, standard_library_files(), max_documents=self.max_documents)

    def _validation_corpus(self) -> Corpus | None:
        if self.val_split is not None:
            return self._rows_of(self.val_split)
        if self.val_paths is not None:
            return FileCorpus(f"val_paths={self.val_paths}", find_files(self.val_paths))
        return None

    def _rows_of(self, split: str) -> Corpus:
        assert self.dataset is not None, "_check_options lets val_split pass only with dataset"
        rows = open_dataset(self.dataset, config=self.dataset_config, split=split)
        return DatasetCorpus(
            f"{self.dataset} ({split})", rows, text_column=self.text_column, max_documents=self.max_documents
        )

    def _pointer(self) -> Path:
        """The file in which `prepare_data` tells `setup` what it found, so that content is read once a node."""
        options = [
            self.paths, self.val_paths, self.dataset, self.dataset_config, self.split, self.val_split,
            self.text_column, self.max_documents, self.tokenizer_path, self.vocab_size, self.val_fraction, Path.cwd(),
        ]  # fmt: skip
        return self.cache / "last" / blake2b(repr(options).encode(), digest_size=16).hexdigest()

    def _sequences(self, split: str) -> PackedSequences:
        stream = self.prepared.stream(split)
        return PackedSequences(stream, seq_len=self.seq_len, end_of_text=end_of_text(self.tokenizer))

    def _loader(self, sequences: PackedSequences, **order: Any) -> DataLoader[Any]:
        return DataLoader(
            sequences,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **order,
        )

    def _check_options(self) -> None:
        sources = {"paths": self.paths, "dataset": self.dataset}
        if all(value is not None for value in sources.values()):
            raise ValueError(f"text comes from one source; got both {sources}; give paths or dataset")
        if self.val_split is not None and self.dataset is None:
            raise ValueError(f"val_split names a split of dataset, which isn't given; got val_split={self.val_split!r}")
        if self.val_split is not None and self.val_paths is not None:
            raise ValueError("held-out text comes from one source; got both val_split and val_paths")
        self._options()  # checks itself
        least = {"seq_len": 1, "batch_size": 1, "num_workers": 0, "max_documents": 1}
        for option, smallest in least.items():
            value = getattr(self, option)
            if value is not None and value < smallest:
                raise ValueError(f"{option} must be at least {smallest}; got {value}")

    def _check_lengths(self, prepared: Prepared) -> None:
        if prepared.train.num_tokens < self.seq_len:
            raise ValueError(
                f"the training split must fill one sequence; {self.source} has {prepared.train.num_tokens} tokens "
                f"({prepared.train.num_documents} documents) to train on, seq_len={self.seq_len}; "
                "use a smaller seq_len or more text"
            )
        if 0 < prepared.validation.num_tokens < self.seq_len:
            log.warning(
                "the validation split has %d tokens, less than one sequence of seq_len=%d; its loss will be noisy",
                prepared.validation.num_tokens,
                self.seq_len,
            )


def _as_list(paths: list[str] | str | None) -> list[str] | None:
    return [paths] if isinstance(paths, str) else paths
