"""Every operation with inputs, what it computes by raw operations, and what that is by its reference and autograd.

The raw operations are those of `torch.ops.ptdp`, or of a library with the same schemas that runs other kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ptdp.kernels import reference

Tensors = dict[str, Tensor]

# Absolute for values of about 1, relative to the largest where they are larger; gradients, which round more often, may
# be off by twice that.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One operation.

    inputs: a shape and a dtype -> tensors by name; those that begin with "grad" are gradients of the result.
    compute: raw operations and inputs -> values and gradients by name. expect: the same from the reference.
    """

    inputs: Callable[[tuple[int, ...], torch.dtype], Tensors]
    compute: Callable[[Any, Tensors], Tensors]
    expect: Callable[[Tensors], Tensors]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def by_autograd(function: Callable[..., Tensor], tensors: Tensors, *names: str) -> Tensors:
    """The value of a function of the named inputs and their gradients, in float64."""
    leaves = {name: tensors[name].double().requires_grad_() for name in names}
    value = function(*leaves.values())
    grads = torch.autograd.grad(value, list(leaves.values()), tensors["grad"].double())
    return {"y": value.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


# -- softmax -----------------------------------------------------------------------------------------------------------


def softmax_case(kind: str, scale: float) -> Case:
    causal = kind == "causal"

    def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
        made = {"x": random(*shape, dtype=dtype), "grad": random(*shape, dtype=dtype)}
        if kind == "masked":
            mask = torch.rand(shape) < 0.4
            mask[..., :1, :] = True  # throughout
            made["mask"] = mask
        if kind == "masked rows":
            made["mask"] = (torch.rand(*shape[:-1], 1) < 0.5).expand(shape)
        return made

    def compute(ops: Any, t: Tensors) -> Tensors:
        y = ops.softmax(t["x"], t.get("mask"), scale, causal)
        return {"y": y, "dx": ops.softmax_backward(t["grad"], y, scale, causal)}

    def expect(t: Tensors) -> Tensors:
        return by_autograd(lambda x: reference.softmax(x, t.get("mask"), scale, causal), t, "x")

    return Case(inputs, compute, expect)


# -- norms -------------------------------------------------------------------------------------------------------------


def norm_case(*, centers: bool, affine: bool, saves_output: bool = False) -> Case:
    names = ("weight", "bias")[: 1 + centers] if affine else ()

    def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
        vectors = {"weight": random(shape[-1]) * 0.2 + 1, "bias": random(shape[-1])}
        return {
            "x": random(*shape, dtype=dtype) + 0.5,
            "grad": random(*shape, dtype=dtype),
            **{name: vectors[name] for name in names},
        }

    def compute(ops: Any, t: Tensors) -> Tensors:
        weight, bias = t.get("weight"), t.get("bias")
        y, mean, rstd = ops.norm(t["x"], weight, bias, 1e-5, centers, saves_output)
        saved = y if saves_output else t["x"]
        dx, dweight, dbias = ops.norm_backward(t["grad"], saved, weight, bias, mean, rstd, 1e-5, centers, saves_output)
        found = {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
        return {name: found[name] for name in ("y", "dx", *(f"d{name}" for name in names))}

    def function(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reference.norm(x, weight, bias, 1e-5, centers=centers)

    return Case(inputs, compute, lambda t: by_autograd(function, t, "x", *names))


# -- elementwise -------------------------------------------------------------------------------------------------------


def gelu_case(*, has_bias: bool) -> Case:
    def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
        made = {"x": 2 * random(*shape, dtype=dtype), "grad": random(*shape, dtype=dtype)}
        return made | ({"bias": random(shape[-1])} if has_bias else {})

    def compute(ops: Any, t: Tensors) -> Tensors:
        dx, dbias = ops.bias_gelu_backward(t["grad"], t["x"], t.get("bias"))
        return {"y": ops.bias_gelu(t["x"], t.get("bias")), "dx": dx} | ({"dbias": dbias} if has_bias else {})

    names = ("x", "bias") if has_bias else ("x",)
    return Case(inputs, compute, lambda t: by_autograd(lambda x, bias=None: reference.bias_gelu(x, bias), t, *names))


def swiglu_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    """Gate and up are halves of one tensor: no copy is made of them."""
    gate, up = random(*shape[:-1], 2 * shape[-1], dtype=dtype).chunk(2, -1)
    return {"gate": gate, "up": up, "grad": random(*shape, dtype=dtype)}


def swiglu(ops: Any, t: Tensors) -> Tensors:
    dgate, dup = ops.swiglu_backward(t["grad"], t["gate"], t["up"])
    return {"y": ops.swiglu(t["gate"], t["up"]), "dgate": dgate, "dup": dup}


def dropout_case(p: float, *, has_bias: bool) -> Case:
    def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
        made = {name: random(*shape, dtype=dtype) for name in ("x", "residual", "grad")}
        made["seed"] = torch.tensor([-(2**62) + 12345])
        return made | ({"bias": random(shape[-1])} if has_bias else {})

    def compute(ops: Any, t: Tensors) -> Tensors:
        y = ops.dropout_add(t["x"], t.get("bias"), t["residual"], t["seed"], p)
        dx, dbias = ops.dropout_add_backward(t["grad"], t["seed"], p, has_bias)
        return {"y": y, "dx": dx} | ({"dbias": dbias} if has_bias else {})

    def expect(t: Tensors) -> Tensors:
        def function(x: Tensor, bias: Tensor | None = None) -> Tensor:
            return reference.dropout_add(x, bias, t["residual"].double(), t["seed"], p)

        return by_autograd(function, t, *(("x", "bias") if has_bias else ("x",)))

    return Case(inputs, compute, expect)


def rotary_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    """Angles for each position, a quarter of the width; x lies as the heads of a projection do, not contiguous."""
    *leading, positions, width = shape
    angles = (random(positions, max(1, width // 4)) if width > 1 else random(positions, 0)).expand(*leading, -1, -1)
    x = random(positions, *leading, width, dtype=dtype).movedim(0, -2)
    return {"x": x, "cos": angles.cos(), "sin": angles.sin(), "grad": random(*shape, dtype=dtype)}


def rotary(ops: Any, t: Tensors) -> Tensors:
    return {
        "y": ops.rotary(t["x"], t["cos"], t["sin"], False),
        "dx": ops.rotary(t["grad"], t["cos"], t["sin"], True),
    }


def expected_rotary(t: Tensors) -> Tensors:
    return by_autograd(lambda x: reference.rotary(x, t["cos"], t["sin"], inverse=False), t, "x")


# -- cross-entropy -----------------------------------------------------------------------------------------------------


def cross_entropy_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
    rows, width = torch.Size(shape[:-1]).numel(), shape[-1]
    target = torch.randint(-1, width, (rows,))
    scale = torch.rand(rows)
    scale[::5] = 0.0
    normalizer = random(rows) * 0.1 + 3
    return {"logits": random(rows, width, dtype=dtype), "target": target, "scale": scale, "normalizer": normalizer}


def cross_entropy(ops: Any, t: Tensors) -> Tensors:
    peak, sum_exp, sum_shifted = ops.cross_entropy_stats(t["logits"])
    dx = ops.cross_entropy_gradient(t["logits"], t["target"], t["normalizer"], t["scale"], 0.01, 0.9)
    return {"peak": peak, "sum_exp": sum_exp, "sum_shifted": sum_shifted, "dx": dx}


def expected_cross_entropy(t: Tensors) -> Tensors:
    logits, normalizer, scale = (t[name].double() for name in ("logits", "normalizer", "scale"))
    peak, sum_exp, sum_shifted = reference.cross_entropy_stats(logits)
    dx = reference.cross_entropy_gradient(logits, t["target"], normalizer, scale, uniform=0.01, hit=0.9)
    return {"peak": peak, "sum_exp": sum_exp, "sum_shifted": sum_shifted, "dx": dx}


CASES: dict[str, Case] = {
    "softmax": softmax_case("plain", 0.7),
    "softmax of a negative scale": softmax_case("plain", -1.3),
    "masked softmax": softmax_case("masked", 0.7),
    "softmax of masked rows": softmax_case("masked rows", 0.7),
    "causal softmax": softmax_case("causal", 0.7),
    "layer norm": norm_case(centers=True, affine=True),
    "layer norm, plain": norm_case(centers=True, affine=False),
    "layer norm, saving its output": norm_case(centers=True, affine=True, saves_output=True),
    "rms norm": norm_case(centers=False, affine=True),
    "rms norm, saving its output": norm_case(centers=False, affine=True, saves_output=True),
    "bias and gelu": gelu_case(has_bias=True),
    "gelu": gelu_case(has_bias=False),
    "swiglu": Case(swiglu_inputs, swiglu, lambda t: by_autograd(reference.swiglu, t, "gate", "up")),
    "bias, dropout, add": dropout_case(0.3, has_bias=True),
    "dropout of all, add": dropout_case(1.0, has_bias=False),
    "bias, add": dropout_case(0.0, has_bias=True),
    "rotary": Case(rotary_inputs, rotary, expected_rotary),
    "cross-entropy": Case(cross_entropy_inputs, cross_entropy, expected_cross_entropy),
}


def largest_error(ops: Any, case: Any, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[float, str]:
    """The largest error over values and gradients in units of the tolerance, and where it is."""
    tensors = case.inputs(shape, dtype)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    found, expected = case.compute(ops, tensors), case.expect(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, kept[name]), f"input {name} was written into"
    allowed = {name: TOLERANCE[dtype] * (2 if name.startswith("d") else 1) for name in found}
    errors = {name: _error(value, expected[name]) / allowed[name] for name, value in found.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    return (errors[worst], worst) if errors else (0.0, worst)


def _error(value: Tensor, expected: Tensor) -> float:
    assert value.shape == expected.shape, f"{value.shape} instead of {expected.shape}"
    if not value.numel():
        return 0.0
    size = max(1.0, expected.abs().max().item())
    difference: float = (value.double() - expected).abs().nan_to_num(nan=float("inf")).max().item()
    return difference / size
