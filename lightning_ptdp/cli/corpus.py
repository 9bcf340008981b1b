"""`ptdp data`, which prepares a corpus as training would, and says what came out."""

from lightning_ptdp.data import TextDataModule, num_sequences
from lightning_ptdp.data.preparation import Part

from .terminal import say, show_table


def prepare_corpus(module: TextDataModule) -> None:
    """Prepare a corpus for training, and count documents, tokens and sequences."""
    module.prepare_data()
    module.setup()
    prepared = module.prepared
    columns = ["split", "documents", "bytes", "tokens", "bytes a token", f"sequences of {module.seq_len}"]
    rows = [_row("train", prepared.train, module.seq_len), _row("validation", prepared.validation, module.seq_len)]
    show_table(f"{module.source}, vocabulary {prepared.vocab_size:,}", columns, rows)
    say(f"kept in {prepared.folder}")


def _row(name: str, part: Part, seq_len: int) -> list[str]:
    bytes_a_token = part.num_bytes / part.num_tokens if part.num_tokens else 0.0
    counts = [part.num_documents, part.num_bytes, part.num_tokens]
    sequences = num_sequences(part.num_tokens, seq_len)
    return [name, *(f"{count:,}" for count in counts), f"{bytes_a_token:.2f}", f"{sequences:,}"]
