"""Notes and compares where random generators stand, and puts them back there.

Three libraries keep a default generator: PyTorch (one a device), NumPy and Python. PyTorch's are objects, whose
states travel in pairs of (generator, state); the other two are one value, `HostState`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """PyTorch's default generators that operations on the host and on `device` draw from."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.default_generator, torch.cuda.default_generators[index]
    return (torch.default_generator,)


def states_of(found: Iterable[torch.Generator]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Note where each generator stands."""
    return [(generator, generator.get_state()) for generator in found]


def go_to(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Put each generator where `states_of` found it."""
    for generator, state in states:
        generator.set_state(state)


@contextmanager
def kept(found: Iterable[torch.Generator]) -> Iterator[None]:
    """Let generators move within the context; afterwards they stand where they stood."""
    states = states_of(found)
    try:
        yield
    finally:
        go_to(states)


@contextmanager
def drawing_from(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> Iterator[None]:
    """Let generators draw from other states within the context; afterwards they stand where they stood."""
    states = tuple(states)
    with kept(generator for generator, _ in states):
        go_to(states)
        yield


class HostState:
    """Where Python's and NumPy's default generators stood when this was made; two are equal if neither has moved."""

    __hash__ = None  # type: ignore[assignment]  # compared, and never a key

    def __init__(self) -> None:
        self._python = random.getstate()
        arrays: Any = numpy.random.get_state()
        self._kind, self._words, *self._rest = arrays

    def __eq__(self, other: object) -> bool:
        """Whether the generators stood at the same place."""
        if not isinstance(other, HostState):
            return NotImplemented
        return (
            self._python == other._python
            and self._rest == other._rest
            and bool(numpy.array_equal(self._words, other._words))
        )

    def go_back(self) -> None:
        """Put the generators back there."""
        random.setstate(self._python)
        numpy.random.set_state((self._kind, self._words, *self._rest))


def random_state(device: torch.device) -> dict[str, Any]:
    """Note where the default generators (PyTorch's, NumPy's, Python's) stand, as plain values for a checkpoint."""
    arrays: Any = numpy.random.get_state()
    kind, keys, *rest = arrays
    return {
        "torch": [generator.get_state() for generator in generators(device)],
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(numpy.int64)), *rest],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the default generators where `random_state` found them, on a device of the same kind."""
    for generator, position in zip(generators(device), state["torch"], strict=True):
        generator.set_state(position)
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
