"""The recipe's GPT as GPT-2 of transformers: the same function, its weights under other names."""

from typing import Any

import torch
from torch import Tensor, nn

from .model import GPT


def to_gpt2(model: GPT) -> Any:
    """A GPT2LMHeadModel with the weights of a GPT; equal logits.

    GPT-2 keeps linear weights as [in, out], and query, key and value in one matrix.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ImportError("GPT-2 of transformers needs transformers; pip install 'lightning_ptdp[hf]'") from error
    vocab_size, hidden_size = model.tok.weight.shape
    is_tied = model.head.weight is model.tok.weight
    dropout = model.drop.p
    attention: Any = model.blocks[0].attn
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=model.max_seq_len,
        n_embd=hidden_size,
        n_layer=len(model.blocks),
        n_head=hidden_size // attention.head_dim,
        activation_function="gelu_new",
        layer_norm_epsilon=model.norm.eps,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=None,
        dtype=model.tok.weight.dtype,
    )
    gpt2: nn.Module = GPT2LMHeadModel(config)
    gpt2.to(model.tok.weight.dtype).load_state_dict(gpt2_state(model))
    return gpt2.train(model.training)


def gpt2_state(model: GPT) -> dict[str, Tensor]:
    """The weights of a GPT under the names of GPT2LMHeadModel."""
    state = {
        "transformer.wte.weight": model.tok.weight,
        "transformer.wpe.weight": model.pos.weight,
        **_norm("transformer.ln_f", model.norm),
        "lm_head.weight": model.head.weight,
    }
    for i, part in enumerate(model.blocks):
        block: Any = part
        at, attn, mlp = f"transformer.h.{i}", block.attn, block.mlp
        state |= {
            **_norm(f"{at}.ln_1", block.norm1),
            **_linear(f"{at}.attn.c_attn", attn.q, attn.k, attn.v),
            **_linear(f"{at}.attn.c_proj", attn.proj),
            **_norm(f"{at}.ln_2", block.norm2),
            **_linear(f"{at}.mlp.c_fc", mlp.up),
            **_linear(f"{at}.mlp.c_proj", mlp.down),
        }
    return {name: weight.detach() for name, weight in state.items()}


def _norm(name: str, norm: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}


def _linear(name: str, *linears: nn.Linear) -> dict[str, Tensor]:
    """One linear of the outputs of several."""
    return {
        f"{name}.weight": torch.cat([linear.weight for linear in linears]).T,
        f"{name}.bias": torch.cat([linear.bias for linear in linears]),
    }
