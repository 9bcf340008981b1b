"""Follows the modules of a run: which one is running, which draw random numbers, and what they return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.generators import HostState
from lightning_ptdp.host.torch import pytree


@dataclass(frozen=True)
class Output:
    """The first floating tensor that a call of a module returned, in short.

    Attributes:
        shape: of the tensor.
        total: weighted sum of its elements, which differs if elements are swapped.
        norm: 2-norm of its elements.
    """

    shape: tuple[int, ...]
    total: float
    norm: float

    @classmethod
    def of(cls, value: Any) -> Output | None:
        """Describe the first plain floating tensor of a structure; None if there is none."""
        for leaf in pytree.tree_leaves(value):
            if type(leaf) in (Tensor, nn.Parameter) and leaf.is_floating_point():
                values = leaf.detach().double()
                weights = torch.linspace(0.5, 1.5, values.numel(), dtype=torch.float64).view(values.shape)
                return cls(tuple(leaf.shape), float((values * weights).sum()), float(values.norm()))
        return None

    def is_near(self, other: Output, tolerance: float) -> bool:
        """Whether both describe the same values, within a tolerance relative to the larger norm."""
        room = tolerance * max(self.norm, other.norm)
        return abs(self.norm - other.norm) <= room and abs(self.total - other.total) <= room


@dataclass
class CallTrace:
    """The calls of a module's parts, by full name.

    Attributes:
        running: names of the modules whose forward has begun and not ended, the innermost last.
        draws: names of leaf modules that moved a random generator, once a call.
        outputs: what calls returned, by (name, number of the call among those of the module), in order.
    """

    running: list[str] = field(default_factory=list)
    draws: list[str] = field(default_factory=list)
    outputs: dict[tuple[str, int], Output] = field(default_factory=dict)
    _states: list[tuple[torch.Tensor, HostState]] = field(default_factory=list)

    def attach(self, module: nn.Module, *, draws: bool = False, outputs: bool = False) -> None:
        """Follow the calls of a module's parts from now on.

        Args:
            module: whose parts are followed, by hooks that stay.
            draws: whether to note which leaf modules draw random numbers.
            outputs: whether to note what calls return.
        """
        for name, child in module.named_modules():
            self._follow(name, child, draws=draws, outputs=outputs)

    def _follow(self, name: str, module: nn.Module, *, draws: bool, outputs: bool) -> None:
        is_leaf = not any(True for _ in module.children())
        num_calls = 0

        def before(*_: Any) -> None:
            self.running.append(name)
            if draws and is_leaf:
                self._states.append(generator_states())

        def after(_: nn.Module, __: Any, output: Any) -> None:
            nonlocal num_calls
            self.running.pop()
            if draws and is_leaf and not are_same_states(self._states.pop(), generator_states()):
                self.draws.append(name)
            found = Output.of(output) if outputs else None
            if found is not None:
                self.outputs[name, num_calls] = found
                num_calls += 1

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def generator_states() -> tuple[torch.Tensor, HostState]:
    """Where the default generators stand: PyTorch's on the host, NumPy's and Python's."""
    return torch.get_rng_state(), HostState()


def are_same_states(first: tuple[torch.Tensor, HostState], second: tuple[torch.Tensor, HostState]) -> bool:
    """Whether no generator moved between two states."""
    return torch.equal(first[0], second[0]) and first[1] == second[1]
