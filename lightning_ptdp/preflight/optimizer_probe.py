"""Finds out whether an optimizer steps a part of the parameters just as it does when it has all of them.

Ranks step parts of a model: pipeline ranks whole parameters, but not all of them; tensor ranks pieces of parameters.
That is right for an optimizer that treats each element alone. Those of torch and of NVIDIA Apex are known by name. Any
other is tried: rebuilt from its options on a few small parameters, it steps them all together, each parameter alone,
and each in two pieces, with the same gradients. Where the results differ, the split would change the numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_ptdp.kernels.status import find_apex

_SHAPES: tuple[tuple[int, ...], ...] = ((), (6,), (6, 4), (4, 3, 2), (4, 2, 2, 2))
_SCALES = (0.1, 10.0, 1.0, 0.5)  # for each step, a factor of all gradients
_SEED = 20210415
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest step: sums in another order


@dataclass(frozen=True)
class Verdict:
    """How far steps on parts are from steps on the whole, relative to the largest step.

    Attributes:
        apart: the difference if each parameter is stepped without the others; 0 if there is none, NaN if unknown.
        in_pieces: the further difference if each parameter is stepped in pieces; likewise.
        unknown: why the optimizer could not be tried; empty if it was.
    """

    apart: float = 0.0
    in_pieces: float = 0.0
    unknown: str = ""

    @property
    def is_parameterwise(self) -> bool:
        """Whether the step of a parameter depends on no other parameter."""
        return self.apart == 0.0

    @property
    def is_elementwise(self) -> bool:
        """Whether the step of an element depends on no other element, so that parameters may be cut."""
        return self.is_parameterwise and self.in_pieces == 0.0


_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.ASGD,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
_ELEMENTWISE_OF_APEX = frozenset(
    {
        "apex.optimizers.fused_adam.FusedAdam",
        "apex.optimizers.fused_sgd.FusedSGD",
        "apex.optimizers.fused_adagrad.FusedAdagrad",
    }
)


def judge(optimizer: Optimizer) -> Verdict:
    """Find out whether the steps of an optimizer may be split.

    Neither the optimizer nor its parameters nor random generators change.

    Args:
        optimizer: any. If it has an attribute `is_elementwise`, True or False, that is believed.
    """
    declared = getattr(optimizer, "is_elementwise", None)
    if isinstance(declared, bool):
        return Verdict() if declared else Verdict(in_pieces=math.inf)
    if _is_known(type(optimizer)) or not any(group["params"] for group in optimizer.param_groups):
        return Verdict()
    return _tried(optimizer)


def _is_known(kind: type[Optimizer]) -> bool:
    """Whether a class is known to step each element alone."""
    if kind in _ELEMENTWISE:
        return True
    return f"{kind.__module__}.{kind.__qualname__}" in _ELEMENTWISE_OF_APEX and find_apex() == "nvidia"


def _tried(optimizer: Optimizer) -> Verdict:
    """Try an optimizer in float64, and in float32 if it fails there."""
    error = ""
    for dtype in _TOLERANCE:
        try:
            return _try(optimizer, dtype)
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
    return Verdict(math.nan, math.nan, error)


def _try(optimizer: Optimizer, dtype: torch.dtype) -> Verdict:
    """Step small parameters together, each alone, and each in two pieces, and compare.

    Raises:
        RuntimeError: the steps are 0 or infinite, so that nothing can be compared.
        Exception: what the optimizer raises.
    """
    groups = _sample(optimizer, dtype)
    with torch.random.fork_rng():
        whole = _step(optimizer, groups)
        largest = max(float((after - sample.start).abs().max()) for sample, after in _pairs(groups, whole))
        if not 0.0 < largest < math.inf:
            raise RuntimeError(f"its steps on small parameters have the size {largest}")
        limit, apart, in_pieces = _TOLERANCE[dtype] * largest, 0.0, 0.0
        for i, group in enumerate(groups):

            def alone(sample: _Sample, i: int = i) -> Tensor:
                return _step(optimizer, [[sample] if k == i else [] for k in range(len(groups))])[i][0]

            for j, sample in enumerate(group):
                after = alone(sample)
                apart = max(apart, _distance(after, whole[i][j], limit))
                for dim in range(sample.start.ndim):
                    joined = torch.cat([alone(piece) for piece in sample.halves(dim)], dim)
                    in_pieces = max(in_pieces, _distance(joined, after, limit))
    return Verdict(apart / largest, in_pieces / largest)


@dataclass(frozen=True)
class _Sample:
    """A small parameter to try an optimizer on.

    Attributes:
        start: its first value, of any shape.
        targets: [steps, *shape], the values towards which the gradient of each step pulls it.
    """

    start: Tensor
    targets: Tensor

    def halves(self, dim: int) -> list[_Sample]:
        """Cut it in two along a dim."""
        pieces = zip(self.start.tensor_split(2, dim), self.targets.tensor_split(2, dim + 1), strict=True)
        return [_Sample(*piece) for piece in pieces]


def _sample(optimizer: Optimizer, dtype: torch.dtype) -> list[list[_Sample]]:
    """Make small parameters for each group of an optimizer: two of each number of dims that its own members have."""
    generator = torch.Generator().manual_seed(_SEED)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    groups = []
    for group in optimizer.param_groups:
        ndims = sorted({min(parameter.ndim, len(_SHAPES) - 1) for parameter in group["params"]})
        device = next((parameter.device for parameter in group["params"]), torch.device("cpu"))
        samples = []
        for shape in (shape for ndim in ndims for shape in (_SHAPES[ndim], _SHAPES[ndim][::-1])):
            spread = draw(*shape).exp()  # rows and columns of unlike size
            start, targets = draw(*shape) * spread, draw(len(_SCALES), *shape) * spread
            samples.append(_Sample(start.to(device), targets.to(device)))
        groups.append(samples)
    return groups


def _pairs(groups: list[list[_Sample]], results: list[list[Tensor]]) -> Iterator[tuple[_Sample, Tensor]]:
    """Go through the samples of all groups, each with its result."""
    for samples, tensors in zip(groups, results, strict=True):
        yield from zip(samples, tensors, strict=True)


def _step(optimizer: Optimizer, groups: list[list[_Sample]]) -> list[list[Tensor]]:
    """Let a new optimizer of the same kind take a few steps from the samples; returns where they end, by group."""
    torch.manual_seed(_SEED)
    parameters = [[nn.Parameter(sample.start.clone()) for sample in samples] for samples in groups]
    twin = _rebuilt(optimizer, parameters)
    members = [
        (p, s) for group, samples in zip(parameters, groups, strict=True) for p, s in zip(group, samples, strict=True)
    ]
    for k, scale in enumerate(_SCALES):

        def closure(k: int = k, scale: float = scale) -> Tensor:
            with torch.no_grad():
                for parameter, sample in members:
                    parameter.grad = (parameter - sample.targets[k]) * scale
            return torch.ones(())

        closure()
        twin.step(closure)  # type: ignore[arg-type]  # whose loss is a tensor, as everywhere
    return [[parameter.detach() for parameter in group] for group in parameters]


def _rebuilt(optimizer: Optimizer, parameters: list[list[nn.Parameter]]) -> Optimizer:
    """Make an optimizer of the same class and options for other parameters.

    Raises:
        TypeError: its constructor asks for something that its options do not tell.
    """
    kind = type(optimizer)
    signature = inspect.signature(kind).parameters
    arguments = {name: _step_size(name, value) for name, value in optimizer.defaults.items() if name in signature}
    missing = [
        name
        for name, each in list(signature.items())[1:]
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and name not in arguments
    ]
    if missing:
        raise TypeError(f"its constructor asks for {', '.join(missing)}, which its options do not tell")
    groups = []
    for group, members in zip(optimizer.param_groups, parameters, strict=True):
        options = {
            name: _step_size(name, value) for name, value in group.items() if name not in ("params", "initial_lr")
        }
        groups.append({**options, "params": members})
    return kind(groups, **arguments)


def _step_size(name: str, value: Any) -> Any:
    """Replace a learning rate of 0, at which a schedule may start, by one that moves something."""
    if name != "lr" or not isinstance(value, int | float | Tensor) or float(value) > 0.0:
        return value
    return 0.01


def _distance(mine: Tensor, theirs: Tensor, limit: float) -> float:
    """The largest difference of two tensors; 0 if it is within the limit."""
    off = float((mine - theirs).abs().nan_to_num(nan=math.inf).max())
    return off if off > limit else 0.0
