"""One row for each parameter that this rank owns: its names, its owners, its shard, and what optimizers step for it.

name       of the plain module, the first where weights are tied; `local` is every name that it has here
stages     that own it, under any of its names
shard      of the whole that tensor peers cut; None for what each of them holds whole
weight     what an optimizer steps: the parameter, its float32 main weight, or this replica's piece of that
counts     whether this rank is the one to count it where the whole model is summed up
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.data_parallel.main_weights import FlatPiece, MainWeights
from lightning_ptdp.data_parallel.tied import SharedParameter
from lightning_ptdp.pipeline.one_stage import Stages
from lightning_ptdp.tensor_parallel.placement import Placement
from lightning_ptdp.tensor_parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class Row:
    """A parameter of the module that this rank owns; the head of this file says what the columns are.

    piece: of the flattened parameter, that `weight` is; None for all of it.
    """

    name: str
    local: tuple[str, ...]
    parameter: nn.Parameter
    stages: frozenset[int]
    shard: Shard | None
    weight: nn.Parameter
    piece: FlatPiece | None
    counts: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which this rank saves it: those that it has here, and the plain module's first."""
        return tuple(dict.fromkeys((*self.local, self.name)))


class Parameters:
    """The table. It is read off the module when made, and again by `read` once something may have changed."""

    def __init__(
        self,
        module: nn.Module,
        stages: Stages,
        placement: Placement,
        groups: Groups,
        mains: MainWeights | None = None,
    ) -> None:
        """Read the rows of a module that is split.

        Args:
            stages: the module as this rank's stages.
            placement: where tensor peers cut.
            mains: what optimizers of an earlier run stepped, which a checkpoint of this one holds.
        """
        self._module, self._stages, self._groups = module, stages, groups
        self.placement, self.mains = placement, mains
        self.rows: tuple[Row, ...] = ()
        self._row_of: dict[nn.Parameter, Row] = {}
        self.read()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, parameter: nn.Parameter) -> Row:
        """The row of a parameter of the module, or of what an optimizer steps for it."""
        return self._row_of[self.parameter_of(parameter)]

    def read(self) -> Parameters:
        """Read the rows again: after optimizers were bound, or a user changed the module; returns itself."""
        local: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            local.setdefault(parameter, []).append(name)
        aliases = self._stages.aliases
        self.rows = tuple(self._row(parameter, aliases[names[0]][0], names) for parameter, names in local.items())
        self._row_of = {row.parameter: row for row in self.rows}
        return self

    def _row(self, parameter: nn.Parameter, name: str, local: Sequence[str]) -> Row:
        stages, shard, at = self._stages.owners(name), self.placement.shards.get(name), self._groups.at
        piece = None if self.mains is None else self.mains.piece_of(parameter)
        first_owner = min(stages) % self._groups.topology.pipeline_parallel_size
        counts = at.pipeline == first_owner and (at.tensor == 0 or shard is not None)
        return Row(name, tuple(local), parameter, stages, shard, self.weight_of(parameter), piece, counts)

    # -- the whole model ---------------------------------------------------------------------------------------------

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the plain module's state, in order."""
        return self._stages.state_names

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """All names of each of the plain module's parameters, by each of them."""
        return self._stages.aliases

    @property
    def hollow(self) -> frozenset[nn.Parameter]:
        """What stands here for the parameters that other ranks own."""
        return self._stages.hollow

    def whole(self) -> AbstractContextManager[None]:
        """Within, the module's parameters are those of the whole model, hollow ones included."""
        return self._stages.whole()

    # -- what this rank owns -----------------------------------------------------------------------------------------

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The plain module's name of each parameter."""
        return {row.parameter: row.name for row in self.rows}

    @property
    def held_names(self) -> dict[nn.Parameter, str]:
        """The plain module's name of what optimizers step for each parameter, or would step."""
        return {row.weight: row.name for row in self.rows}

    @property
    def main_weights(self) -> dict[str, nn.Parameter]:
        """The float32 weights behind 16-bit ones, by each name here: a checkpoint holds them in their place."""
        return {name: r.weight for r in self.rows if r.weight.dtype != r.parameter.dtype for name in r.local}

    def parameter_of(self, weight: nn.Parameter) -> nn.Parameter:
        """The module's parameter behind one that an optimizer holds."""
        return weight if self.mains is None else self.mains.parameter_of(weight)

    def weight_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What optimizers step for a parameter of the module."""
        return parameter if self.mains is None else self.mains.weight_of(parameter)

    def shared(self) -> list[SharedParameter]:
        """The whole model's parameters that several pipeline ranks own, in the order of the plain module."""
        size = self._groups.topology.pipeline_parallel_size
        owned = dict(self._module.named_parameters(remove_duplicate=False))
        found = []
        for name in self._stages.parameter_names if size > 1 else ():
            owners = frozenset(stage % size for stage in self._stages.owners(name))
            if len(owners) > 1:
                mine = owned.get(name)
                shape = self._stages.shapes[name] if mine is None else tuple(mine.shape)
                dtype = torch.promote_types(self._stages.dtypes[name], torch.float32)
                found.append(SharedParameter(mine, owners, shape, dtype))
        return found
