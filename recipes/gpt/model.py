"""A GPT as in GPT-2 and GPT-3: learned positions, norms before attention and MLP, GELU, one matrix for both ends.

    ids [b, s] -> tok + pos -> blocks: x + attn(norm1(x)), then x + mlp(norm2(x)) -> norm -> head -> logits [b, s, V]

Letters: b batch, s sequence length, h hidden size, a heads, l layers, V vocabulary.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_ptdp.nn import BiasDropoutAdd, LayerNorm
from lightning_ptdp.nn.functional import bias_gelu, causal_attention

INIT_STD = 0.02


class GPT(nn.Module):
    """Predicts each next token.

    Args:
        vocab_size: V.
        max_seq_len: the longest sequence; positions beyond have no embedding.
        num_layers: l.
        hidden_size: h, a multiple of num_heads.
        num_heads: a.
        dropout: probability, after the embeddings, in attention and at the end of both parts of a block.
        tie_embeddings: the head's matrix is the token embedding's.

    Raises:
        ValueError: heads don't divide the hidden size.
    """

    # names -> how tensor parallelism may split them, in Hugging Face's vocabulary; plain data, unused in one process
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "tok": "embedding_rowwise",
        "blocks.*.norm1": "sequence_parallel",
        "blocks.*.attn.q": "colwise",
        "blocks.*.attn.k": "colwise",
        "blocks.*.attn.v": "colwise",
        "blocks.*.attn.proj": "rowwise",
        "blocks.*.norm2": "sequence_parallel",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "norm": "sequence_parallel",
        "head": "colwise",
    }

    def __init__(
        self,
        *,
        vocab_size: int,
        max_seq_len: int,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads != 0:
            raise ValueError(
                f"heads share the hidden size evenly, so hidden_size must be a multiple of num_heads; "
                f"got hidden_size={hidden_size}, num_heads={num_heads}"
            )
        self.max_seq_len = max_seq_len
        self.tok = nn.Embedding(vocab_size, hidden_size)
        self.pos = nn.Embedding(max_seq_len, hidden_size)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads=num_heads, dropout=dropout) for _ in range(num_layers))
        self.norm = LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.tok.weight
        init_weights(self, num_layers=num_layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token after each.

        Args:
            ids: [b, s] token numbers, s at most max_seq_len.

        Returns:
            [b, s, V].

        Raises:
            ValueError: the sequence is longer than max_seq_len.
        """
        if ids.shape[1] > self.max_seq_len:
            raise ValueError(
                f"a sequence has at most max_seq_len={self.max_seq_len} tokens, as each position has an embedding; "
                f"got {ids.shape[1]}; lower seq_len of the data or raise max_seq_len of the model"
            )
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x.to(compute_dtype(x)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and MLP, each behind a norm, dropped out and added to its input: [b, s, h] -> [b, s, h]."""

    def __init__(self, hidden_size: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(hidden_size)
        self.attn = Attention(hidden_size, num_heads=num_heads, dropout=dropout)
        self.norm2 = LayerNorm(hidden_size)
        self.mlp = MLP(hidden_size)
        self.add = BiasDropoutAdd(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(self.attn(self.norm1(x)), x)
        out: Tensor = self.add(self.mlp(self.norm2(x)), x)
        return out


class Attention(nn.Module):
    """Causal self-attention: [b, s, h] -> [b, s, h]. The number of heads follows from the width of q, k and v."""

    def __init__(self, hidden_size: int, *, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        self.q = nn.Linear(hidden_size, hidden_size)
        self.k = nn.Linear(hidden_size, hidden_size)
        self.v = nn.Linear(hidden_size, hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)  # [b, a, s, h/a]
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[b, s, a * h/a] -> [b, a, s, h/a]."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Widen four times, GELU, narrow: [b, s, h] -> [b, s, h]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(bias_gelu(self.up(x)))
        return out


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matrices are multiplied in: autocast's dtype where it is on, so that the whole stream is in 16 bits."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def init_weights(module: nn.Module, *, num_layers: int) -> None:
    """GPT-2's start: normal with deviation 0.02, biases 0, and what is added to the residual stream scaled down.

    The stream is the sum of 2 l outputs of `proj` and `down`; dividing their deviation by sqrt(2 l) keeps its variance
    independent of depth (Radford et al. 2019, section 2.3).
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            is_residual = name.endswith((".proj", ".down"))
            nn.init.normal_(part.weight, std=INIT_STD / math.sqrt(2 * num_layers) if is_residual else INIT_STD)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def num_parameters(*, vocab_size: int, max_seq_len: int, num_layers: int, hidden_size: int) -> int:
    """Parameters of a GPT with tied embeddings (SC'21, equation 2, plus the final norm).

    P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)) + 2 h
    """
    num_l, h = num_layers, hidden_size
    return 12 * num_l * h * h + 13 * num_l * h + (vocab_size + max_seq_len) * h + 2 * h
