"""`ptdp generate`, which continues a text with a checkpoint of the GPT recipe, in one process."""

import logging
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lightning_ptdp.checkpoint.reading import read_checkpoint
from lightning_ptdp.data import TextDataModule
from lightning_ptdp.data.tokenizer import end_of_text

from .terminal import say

log = logging.getLogger(__name__)


def generate(
    *,
    ckpt: str,
    prompt: str = "",
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
) -> None:
    """Continue a text with a trained GPT. The checkpoint alone is enough: it holds the tokenizer too.

    Args:
        ckpt: a checkpoint, folder or file, that the GPT recipe wrote, under any strategy.
        prompt: the text to continue; an empty one starts a document.
        max_new_tokens: tokens to draw; the end of the document stops earlier.
        temperature: under 1 prefers likely tokens, 0 takes the likeliest.
        top_k: draw from so many likeliest tokens only; null for all.
        seed: seed of the draw.
    """
    recipe = import_module("lightning_ptdp.recipes.gpt")
    path = Path(ckpt)
    checkpoint = read_checkpoint(path, optimizers=False)
    tokenizer = tokenizer_of(checkpoint, path)
    module = recipe.GPTModule.load_from_checkpoint(in_memory(checkpoint), map_location="cpu", weights_only=True)
    log.info("generating: at most %d tokens with %s", max_new_tokens, path)
    ids = torch.tensor([encode_prompt(tokenizer, prompt)])
    drawn = recipe.generate(
        module.net,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )
    say(prompt + continuation(tokenizer, drawn[0, ids.shape[1] :].tolist()))


def in_memory(checkpoint: dict[str, Any]) -> BytesIO:
    """Write a checkpoint into a file in memory, for readers that take nothing else."""
    stream = BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    return stream


def tokenizer_of(checkpoint: dict[str, Any], path: Path) -> Tokenizer:
    """Take the tokenizer that TextDataModule left in a checkpoint.

    Raises:
        ValueError: the checkpoint comes from a run with another data module.
    """
    state = checkpoint.get(TextDataModule.__qualname__)
    if state is None:
        raise ValueError(
            f"{path} holds no tokenizer: it was trained without {TextDataModule.__qualname__}, which puts its own into "
            "each checkpoint"
        )
    return Tokenizer.from_str(state["tokenizer"])


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode the beginning of a document; as in training, an end of text stands before it."""
    tokenizer.encode_special_tokens = True
    return [end_of_text(tokenizer), *tokenizer.encode(prompt, add_special_tokens=False).ids]


def continuation(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode drawn tokens up to the end of the document."""
    end = end_of_text(tokenizer)
    return str(tokenizer.decode(ids[: ids.index(end)] if end in ids else ids))
