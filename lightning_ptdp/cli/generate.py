"""`ptdp generate`: continue a text with a checkpoint of the GPT recipe, in one process."""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

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
        ckpt: a checkpoint file that the GPT recipe wrote, under any strategy.
        prompt: the text to continue; an empty one starts a document.
        max_new_tokens: tokens to draw; the end of the document stops earlier.
        temperature: under 1 prefers likely tokens, 0 takes the likeliest.
        top_k: draw from so many likeliest tokens only; null for all.
        seed: seed of the draw.
    """
    recipe = import_module("lightning_ptdp.recipes.gpt")
    path = Path(ckpt)
    tokenizer = tokenizer_of(load_checkpoint(path), path)
    module = recipe.GPTModule.load_from_checkpoint(path, map_location="cpu", weights_only=True)
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


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint file, without running any code in it.

    Raises:
        ValueError: there is no such file, or it is a folder of shards.
    """
    if path.is_dir():
        raise ValueError(
            f"generation reads one file; {path} is a folder of shards: join them with "
            f"python -m lightning.pytorch.utilities.consolidate_checkpoint {path} and give the file that it writes"
        )
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path} (seen from {Path.cwd()})")
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return checkpoint


def tokenizer_of(checkpoint: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that TextDataModule left in the checkpoint.

    Raises:
        ValueError: it was trained with another data module.
    """
    state = checkpoint.get(TextDataModule.__qualname__)
    if state is None:
        raise ValueError(
            f"{path} holds no tokenizer: it was trained without {TextDataModule.__qualname__}, which puts its own into "
            "each checkpoint"
        )
    return Tokenizer.from_str(state["tokenizer"])


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The tokens of a document's beginning: each document follows an end of text."""
    tokenizer.encode_special_tokens = True
    return [end_of_text(tokenizer), *tokenizer.encode(prompt, add_special_tokens=False).ids]


def continuation(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of drawn tokens up to the end of the document."""
    end = end_of_text(tokenizer)
    return str(tokenizer.decode(ids[: ids.index(end)] if end in ids else ids))
