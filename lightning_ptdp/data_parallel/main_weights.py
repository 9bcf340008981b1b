"""What an optimizer steps in place of the module's parameters.

    parameters in float32 or wider      the parameters themselves
    parameters in 16 bits               a float32 copy of each, its *main weight*
    sharded over the replicas (ZeRO-1)  of each of these, flattened, the piece that this replica steps

Small steps would be lost in 16 bits, so an optimizer steps main weights, and `refresh` rounds them into the parameters.
Under ZeRO-1 `refresh` also gathers what the other replicas have stepped.

Sharded weights lie in one flat tensor, in the order of their gradients (`buckets`). A replica owns an equal slice of
it, which cuts parameters where it falls; parameters outside the slice have an empty piece, so that an optimizer's
groups list the same members on every replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_ptdp.comm.collectives import all_gather_slices_, own_chunk
from lightning_ptdp.data_parallel.buckets import GradientBuffers
from lightning_ptdp.host.torch import version_of


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A part of a flattened parameter: its elements `start` .. `start + length - 1`."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Main:
    """A parameter of the module, and what the optimizer steps for it.

    Attributes:
        parameter: the module's.
        weight: what the optimizer steps: the parameter itself, its main weight, or a piece of one of them.
        piece: the part of the flattened parameter that `weight` is; None for all of it.
    """

    parameter: nn.Parameter
    weight: nn.Parameter
    piece: FlatPiece | None = None


class MainWeights:
    """What an optimizer steps for each of the parameters in gradient buffers."""

    def __init__(
        self, buffers: GradientBuffers, replicas: ProcessGroup | None, former: MainWeights | None = None
    ) -> None:
        """
        Args:
            buffers: hold the gradients of the parameters.
            replicas: the data-parallel group, if its ranks share the steps out (ZeRO-1); None if each steps all.
            former: main weights of an earlier set of buffers; those of parameters that it knows are taken over, for
                they hold what rounding to 16 bits took from the parameters.
        """
        self._buffers, self._replicas = buffers, replicas
        self._flat: list[tuple[Tensor, Tensor | None]] = []  # weights of a buffer, and the main weights of this slice
        self._of: dict[nn.Parameter, Main] = {} if former is None else dict(former._of)
        self._parameter_of: dict[nn.Parameter, nn.Parameter] = {} if former is None else dict(former._parameter_of)
        self.extend(buffers.parameters)

    def extend(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make what is stepped for parameters that were added to the buffers."""
        replicas, added = self._replicas, [p for p in parameters if p not in self._of]
        for main in self._sharded(added, replicas) if replicas is not None else map(_unsharded, added):
            self._of[main.parameter] = main
            self._parameter_of[main.weight] = main.parameter
        self._note_versions()

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What an optimizer steps for a parameter of the module; the parameter itself if it is not in the buffers."""
        return self._of[parameter].weight if parameter in self._of else parameter

    def piece_of(self, parameter: nn.Parameter) -> FlatPiece | None:
        """The piece of a parameter of the module that this replica steps; None for all of it."""
        return self._of[parameter].piece if parameter in self._of else None

    def parameter_of(self, weight: nn.Parameter) -> nn.Parameter:
        """The module's parameter behind one that an optimizer holds; that one itself if it is the module's."""
        return self._parameter_of.get(weight, weight)

    def __iter__(self) -> Iterator[Main]:
        return iter(self._of.values())

    def install(self, optimizer: Optimizer) -> None:
        """Let an optimizer step these weights in place of the module's parameters, with the state that it has."""
        for group in optimizer.param_groups:
            group["params"] = [self.weight_of(p) for p in group["params"]]
        for main in self:
            state = optimizer.state.pop(main.parameter, {}) if main.weight is not main.parameter else {}
            if not state:
                continue
            optimizer.state[main.weight] = {key: _taken(value, main) for key, value in state.items()}

    def publish(self) -> None:
        """Hand the reduced gradients to what the optimizer steps, as ``.grad``; None if no replica gave one."""
        for main in self:
            gradient = self._buffers.gradient(main.parameter) if main.parameter in self._buffers else None
            if gradient is not None and main.piece is not None:
                piece = main.piece
                gradient = gradient.reshape(-1)[piece.start : piece.start + piece.length] if piece.length else None
            main.weight.grad = gradient

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the module's parameters up to date on all replicas, after the optimizer has stepped."""
        for weights, main in self._pairs():
            weights.copy_(main)
        for weights, _ in self._flat:
            assert self._replicas is not None, "flat weights are sharded"
            all_gather_slices_(weights, self._replicas)
        self._note_versions()

    @torch.no_grad()
    def take_edits(self) -> None:
        """Bring main weights up to date with 16-bit weights that user code edited since the optimizer stepped.

        An element that still is its main weight, rounded, was not edited: its main weight stays, with what rounding
        took. Main weights that were edited themselves, as by loading a checkpoint, stay as they are.
        """
        for (weights, main), version in zip(self._pairs(), self._versions, strict=True):
            if version_of(main) == version:
                main.copy_(torch.where(weights == main.to(weights.dtype), main, weights.to(main.dtype)))
        self._note_versions()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of 16-bit weights and their main weights, as far as this replica steps them."""
        for weights, main in self._flat:
            assert self._replicas is not None, "flat weights are sharded"
            if main is not None:
                yield own_chunk(weights, self._replicas, 0), main
        if self._replicas is None:
            yield from ((main.parameter, main.weight) for main in self if main.weight is not main.parameter)

    def _note_versions(self) -> None:
        """Note how often main weights were edited so far, for `take_edits` to see later edits."""
        self._versions = [version_of(main) for _, main in self._pairs()]

    def _sharded(self, added: Sequence[nn.Parameter], replicas: ProcessGroup) -> Iterator[Main]:
        """Move the parameters of each buffer into one flat tensor, and make weights of this replica's slice of it."""
        for parameters, offsets, length in self._buffers.layout(added):
            weights = _laid_out(parameters, offsets, length)
            mine = own_chunk(weights, replicas, 0)
            main = None if weights.dtype == torch.promote_types(weights.dtype, torch.float32) else mine.float()
            self._flat.append((weights, main))
            low = replicas.rank() * len(mine)
            for parameter, offset in zip(parameters, offsets, strict=True):
                start = min(max(low - offset, 0), parameter.numel())
                stop = min(max(low + len(mine) - offset, 0), parameter.numel())
                held = mine if main is None else main
                values = held[offset + start - low : offset + stop - low] if stop > start else held[:0]
                weight = nn.Parameter(values, requires_grad=parameter.requires_grad)
                yield Main(parameter, weight, FlatPiece(start, stop - start))


def _unsharded(parameter: nn.Parameter) -> Main:
    """What is stepped for a parameter that each replica steps all of."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if dtype == parameter.dtype:
        return Main(parameter, parameter)
    return Main(parameter, nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad))


def _taken(value: Any, main: Main) -> Any:
    """Turn a value of an optimizer's state for a parameter into that for what is stepped in its place."""
    if not isinstance(value, Tensor) or value.shape != main.parameter.shape:
        return value
    piece = main.piece
    part = value if piece is None else value.reshape(-1)[piece.start : piece.start + piece.length].clone()
    return part.to(main.weight.dtype)


def _laid_out(parameters: Sequence[nn.Parameter], offsets: Sequence[int], length: int) -> Tensor:
    """Move parameters into one flat tensor, of which they are views from now on.

    Args:
        parameters: of one dtype and device.
        offsets: where each begins in the flat tensor, in elements.
        length: of the flat tensor, padding included.
    """
    flat = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, offset in zip(parameters, offsets, strict=True):
        view = flat[offset : offset + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat
