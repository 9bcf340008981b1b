"""What every operation means, in plain PyTorch: computed in float32, or in the inputs' dtype if that is wider.

These references run if no kernel is compiled, for float64 everywhere, and for float16 on CPUs. Their gradients are
autograd's. The functions that call them, in the other files of this folder, say what the arguments are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step of Adam.

    Attributes:
        lr: learning rate.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: rate of decay.
        step: number of the step, from 1.
        decoupled: whether weights decay by themselves, as in AdamW; else the decay is added to the gradient.
        corrects_bias: whether moments are divided by 1 - beta^step.
        grad_scale: what the gradients are multiplied by first.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    corrects_bias: bool = True
    grad_scale: float = 1.0


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _maybe(x: Tensor | None, like: Tensor) -> Tensor | None:
    return None if x is None else x.to(like.dtype)


def softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Softmax of scaled scores; mask: boolean, expanded to x's shape."""
    scores = _wide(x) * scale
    if causal:
        queries, keys = x.shape[-2:]
        unseen = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(1 + keys - queries)
        mask = unseen if mask is None else mask | unseen
    if mask is None:
        return torch.softmax(scores, -1).to(x.dtype)
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(mask, lowest), -1).masked_fill(mask, 0.0).to(x.dtype)


def softmax_gradient(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    wide_grad, wide = _wide(grad), _wide(y)
    return (scale * wide * (wide_grad - (wide_grad * wide).sum(-1, keepdim=True))).to(y.dtype)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centers: bool) -> Tensor:
    """LayerNorm, or RMSNorm unless it centers."""
    wide = _wide(x)
    shape = (x.shape[-1],)
    if centers:
        return F.layer_norm(wide, shape, _maybe(weight, wide), _maybe(bias, wide), eps).to(x.dtype)
    return F.rms_norm(wide, shape, _maybe(weight, wide), eps).to(x.dtype)


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = _wide(x)
    return F.gelu(wide if bias is None else wide + bias.to(wide.dtype), approximate="tanh").to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(_wide(gate)) * _wide(up)).to(gate.dtype)


def dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    """residual + dropout(x + bias); seed: one int64 on x's device, from which all draws follow."""
    wide = _wide(x) if bias is None else _wide(x) + bias.to(_wide(x).dtype)
    if p > 0:
        kept = _draws(seed, x.numel()).view(x.shape) >= int(float(torch.tensor(p)) * 4294967295.0)
        wide = torch.where(kept, wide / (1 - p), 0.0) if p < 1 else torch.zeros_like(wide) * wide
    return (_wide(residual) + wide).to(x.dtype)


def _draws(seed: Tensor, count: int) -> Tensor:
    """The upper 32 bits of splitmix64 at `count` indices, as int64: what `draw` of csrc/api.h computes."""
    z = seed + (torch.arange(1, count + 1, device=seed.device) * _signed(0x9E3779B97F4A7C15))
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return _shift(z ^ _shift(z, 31), 32)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    """Turn pairs by angles, or back; cos, sin: expanded to x's leading dims."""
    wide = _wide(x)
    half = cos.shape[-1]
    low, high, rest = wide.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos.to(wide.dtype), -sin.to(wide.dtype) if inverse else sin.to(wide.dtype)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1).to(x.dtype)


def cross_entropy_stats(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    peak = logits.amax(-1).to(wide).clamp(min=torch.finfo(wide).min)
    sum_exp, sum_shifted = torch.empty_like(peak), torch.empty_like(peak)
    for part in _chunks(logits):
        shifted = logits[part].to(wide) - peak[part, None]
        sum_shifted[part] = shifted.sum(-1)
        sum_exp[part] = shifted.exp_().sum(-1)
    return peak, sum_exp, sum_shifted


def cross_entropy_gradient(
    logits: Tensor, target: Tensor, normalizer: Tensor, scale: Tensor, *, uniform: float, hit: float
) -> Tensor:
    result = torch.empty_like(logits)
    hits = (target >= 0).to(normalizer.dtype) * -hit
    at = target.clamp(min=0)
    for part in _chunks(logits):
        probability = (logits[part].to(normalizer.dtype) - normalizer[part, None]).exp_()
        if uniform:
            probability -= uniform
        probability.scatter_add_(1, at[part, None], hits[part, None])
        probability.mul_(scale[part, None]).masked_fill_((scale[part] == 0)[:, None], 0.0)
        result[part] = probability
    return result


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows, each with a small copy in float32."""
    rows = max(1, _CHUNK_BYTES // (4 * max(1, logits.shape[1])))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


@torch.no_grad()
def adam_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    numbers: AdamStep,
    *,
    copies: Sequence[Tensor],
    found_inf: Tensor | None,
) -> None:
    scaled = [g.to(w.dtype) * numbers.grad_scale for w, g in zip(weights, grads, strict=True)]
    if found_inf is not None:
        if not all(bool(g.isfinite().all()) for g in scaled):
            found_inf.fill_(1.0)
        if bool(found_inf):
            return
    beta1, beta2 = numbers.betas
    correction1 = 1 - beta1**numbers.step if numbers.corrects_bias else 1.0
    correction2 = 1 - beta2**numbers.step if numbers.corrects_bias else 1.0
    for w, g, m, v in zip(weights, scaled, first_moments, second_moments, strict=True):
        if numbers.decoupled:
            w.mul_(1 - numbers.lr * numbers.weight_decay)
        else:
            g = g + numbers.weight_decay * w  # noqa: PLW2901
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        w.addcdiv_(m, v.sqrt().div_(correction2**0.5).add_(numbers.eps), value=-numbers.lr / correction1)
    for copy, w in zip(copies, weights, strict=False):
        copy.copy_(w)


@torch.no_grad()
def scale_(inputs: Sequence[Tensor], outputs: Sequence[Tensor], factor: float, found_inf: Tensor) -> None:
    for source, out in zip(inputs, outputs, strict=True):
        product = _wide(source) * factor
        found_inf.masked_fill_(~product.isfinite().all(), 1.0)
        out.copy_(product)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.to(torch.float64 if norm.device.type != "mps" else torch.float32).square()


def l2_norms(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    of_each = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors])
    return torch.linalg.vector_norm(of_each).float(), of_each.float()


@torch.no_grad()
def count_(counters: Sequence[Tensor]) -> list[float]:
    return [counter.add_(1).item() for counter in counters]
