"""Sampling: one token after the other."""

import torch
from torch import Tensor

from .model import GPT


@torch.no_grad()
def generate(
    model: GPT,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue sequences with tokens drawn from the model.

    Args:
        model: in any mode; it is in evaluation mode while it draws.
        ids: [b, s] token numbers, s at least 1; what doesn't fit the model's context is cropped at the front.
        max_new_tokens: tokens to draw.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw from so many most likely tokens only.
        generator: source of randomness; the global one by default.

    Returns:
        [b, s + max_new_tokens].

    Raises:
        ValueError: an argument is out of range.
    """
    if ids.shape[1] == 0:
        raise ValueError("generation continues a sequence of at least 1 token; got 0")
    if temperature < 0 or max_new_tokens < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature and max_new_tokens are at least 0 and top_k at least 1; got temperature={temperature}, "
            f"max_new_tokens={max_new_tokens}, top_k={top_k}"
        )
    was_training = model.training
    model.eval()
    for _ in range(max_new_tokens):
        logits = model(ids[:, -model.max_seq_len :])[:, -1]
        ids = torch.cat([ids, pick(logits, temperature=temperature, top_k=top_k, generator=generator)], dim=1)
    model.train(was_training)
    return ids


def pick(logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token a row: logits [b, V] -> [b, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
