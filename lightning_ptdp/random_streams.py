"""Random streams by name: what must agree between ranks agrees, what must differ differs.

    before the model     one stream a (step, replica, microbatch), the same on all stages and tensor peers
    in a stage           one stream a (step, replica, microbatch, stage), the same on tensor peers
    in a split region    drawn from the stage's stream and the tensor rank

Every stream is a function of the run's seed and of these numbers alone, so that resuming, recomputing and the order of
a schedule change no draw.
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
    """A 63-bit seed from a sequence of numbers, each of which changes all of it (SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RandomStreams:
    """Puts the default generators (PyTorch, NumPy's and Python's) on named streams."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """seed: the same on every rank. device: where the rank computes."""
        self.seed, self._device = seed, device
        self._generators = generators(device)
        self._position: tuple[int, ...] = ()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Within, the streams may move the default generators; afterwards these stand where they stood."""
        state = random_state(self._device)
        try:
            yield
        finally:
            set_random_state(state, self._device)

    def start(self, *position: int) -> None:
        """Go to the stream before the model, of (phase, step, replica, microbatch)."""
        self._position = position
        seed = mix(self.seed, *position)
        self._reseed(seed)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)

    def enter_stage(self, stage: int) -> None:
        """Go on to the stage's own stream."""
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
    """Where activations are split over tensor peers: each draws from a stream of its own, then returns to the shared.

    Its stream is seeded by a draw from the shared one, so that it repeats when that does: in recomputation too.

    Attributes:
        outside: where the shared stream stands while it is left; None while it is not. Who runs a forward again sets
            it.
    """

    def __init__(self, tensor_rank: int, device: torch.device) -> None:
        self._rank = tensor_rank
        self._generators = generators(device)
        self.outside: list[tuple[torch.Generator, torch.Tensor]] | None = None

    def enter(self) -> None:
        """Leave the shared stream; nothing happens where it was left already."""
        if self.outside is not None:
            return
        seed = int(torch.randint(1 << 62, ()))
        self.outside = states_of(self._generators)
        for generator in self._generators:
            generator.manual_seed(mix(seed, 1 + self._rank))

    def leave(self) -> None:
        """Return to the shared stream."""
        if self.outside is None:
            return
        go_to(self.outside)
        self.outside = None
