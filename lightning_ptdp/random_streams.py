"""Random streams by name, so that ranks draw alike where they must agree, and differently where they must differ.

    before the model     a stream for each (step, replica, microbatch), the same on all stages and tensor peers
    in a stage           a stream for each (step, replica, microbatch, stage), the same on tensor peers
    in a split region    a stream for each tensor peer, seeded by a draw from the stage's stream and the tensor rank

A stream depends on the run's seed and on these numbers alone, so that resuming, recomputing and the order of a schedule
change no draw.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import broadcast_object
from lightning_ptdp.generators import generators, go_to, random_state, set_random_state, states_of

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Mix numbers into a 63-bit seed; a change of any bit changes about half of its bits (SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RandomStreams:
    """Puts the default generators (PyTorch's, NumPy's and Python's) on named streams."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """
        Args:
            seed: of the run, the same on every rank.
            device: where the rank computes.
        """
        self.seed, self._device = seed, device
        self._generators = generators(device)
        self._position: tuple[int, ...] = ()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Let the streams move the default generators within the context; afterwards these stand where they stood."""
        state = random_state(self._device)
        try:
            yield
        finally:
            set_random_state(state, self._device)

    def start(self, *position: int) -> None:
        """Put all generators on the stream before the model.

        Args:
            position: numbers that name it: phase, step, replica, microbatch.
        """
        self._position = position
        seed = mix(self.seed, *position)
        self._reseed(seed)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)

    def enter_stage(self, stage: int) -> None:
        """Put PyTorch's generators on the stream of a stage, at the position of the last `start`."""
        self._reseed(mix(self.seed, *self._position, 1 + stage))

    def _reseed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)


def align_random_state(device: torch.device, group: ProcessGroup) -> None:
    """Put the default generators of all ranks where rank 0's stand.

    Ranks that were not seeded, or did not run the same code before (rank 0 alone prepares data), draw alike from then
    on, as one process would: loaders shuffle in one order.
    """
    set_random_state(broadcast_object(random_state(device), 0, group), device)


class SplitRegion:
    """The part of a forward in which tensor peers hold different activations, and so must draw different numbers.

    Outside of it all peers are on one common stream. Within it each peer is on a stream of its own, which is seeded by
    a draw from the common one and by the peer's rank. So it repeats if the common one does, as in recomputation.

    Attributes:
        outside: where the common stream was left; None outside of the region. Recomputation sets it: a second forward
            begins in or out of the region as the first one did.
    """

    def __init__(self, tensor_rank: int, device: torch.device) -> None:
        self._rank = tensor_rank
        self._generators = generators(device)
        self.outside: list[tuple[torch.Generator, torch.Tensor]] | None = None

    def enter(self) -> None:
        """Leave the common stream for the peer's own; does nothing within the region."""
        if self.outside is not None:
            return
        seed = int(torch.randint(1 << 62, ()))
        self.outside = states_of(self._generators)
        for generator in self._generators:
            generator.manual_seed(mix(seed, 1 + self._rank))

    def leave(self) -> None:
        """Return to the common stream; does nothing outside of the region."""
        if self.outside is None:
            return
        go_to(self.outside)
        self.outside = None
