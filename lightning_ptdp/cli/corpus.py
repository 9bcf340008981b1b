"""`ptdp data`, which prepares a corpus as training would, and says what came out."""

from lightning_ptdp.data import TextDataModule, num_sequences
from lightning_ptdp.data.preparation import Part

from .terminal import say, show_table


def prepare_corpus(
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
    val_fraction: float = 0.05,
    cache_dir: str | None = None,
) -> None:
    """Prepare a corpus for training, and count documents, tokens and sequences. The options are TextDataModule's.

    Args:
        paths: your own text: files, folders (searched to the bottom) or globs; a file is a document.
        val_paths: files, folders or globs to validate on; all of paths is then trained on.
        dataset: a dataset on the Hugging Face Hub by name, or a folder that save_to_disk wrote; a row is a document.
        dataset_config: the configuration of that dataset, where it has several.
        split: the split of the dataset to train on.
        val_split: the split to validate on; all of split is then trained on.
        text_column: the column of the dataset that holds the text.
        max_documents: use only so many documents.
        tokenizer: an existing tokenizer.json to use; by default one is trained on the corpus.
        vocab_size: tokens of the tokenizer that is trained.
        seq_len: tokens in a sequence.
        val_fraction: the part of the documents held out for validation, chosen by their content.
        cache_dir: where prepared corpora are kept; ~/.cache/lightning_ptdp/data by default.
    """
    module = TextDataModule(
        paths=paths,
        val_paths=val_paths,
        dataset=dataset,
        dataset_config=dataset_config,
        split=split,
        val_split=val_split,
        text_column=text_column,
        max_documents=max_documents,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        seq_len=seq_len,
        val_fraction=val_fraction,
        cache_dir=cache_dir,
    )
    module.prepare_data()
    module.setup()
    prepared = module.prepared
    columns = ["split", "documents", "bytes", "tokens", "bytes a token", f"sequences of {seq_len}"]
    rows = [_row("train", prepared.train, seq_len), _row("validation", prepared.validation, seq_len)]
    show_table(f"{module.source}, vocabulary {prepared.vocab_size:,}", columns, rows)
    say(f"kept in {prepared.folder}")


def _row(name: str, part: Part, seq_len: int) -> list[str]:
    bytes_a_token = part.num_bytes / part.num_tokens if part.num_tokens else 0.0
    counts = [part.num_documents, part.num_bytes, part.num_tokens]
    sequences = num_sequences(part.num_tokens, seq_len)
    return [name, *(f"{count:,}" for count in counts), f"{bytes_a_token:.2f}", f"{sequences:,}"]
