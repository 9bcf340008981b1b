"""The pipeline of one: a module that is a single stage, and stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_ptdp.pipeline.partition import ONE_STAGE, Partition
from lightning_ptdp.pipeline.skeleton import Payload, Skeleton, aliases_of
from lightning_ptdp.pipeline.step_run import StepRun


class OneStage:
    """Answers what `Skeleton` answers, of a module that nobody cuts.

    Names are read off the module at each question: a user may change it between runs.
    """

    hollow: frozenset[nn.Parameter] = frozenset()

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def partition(self) -> Partition:
        """One stage, which owns everything."""
        return ONE_STAGE

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the module's state, in order."""
        return tuple(self._module.state_dict())

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the module's parameters, the first of each."""
        return tuple(name for name, _ in self._module.named_parameters())

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """For each name of a parameter, all names of it."""
        return aliases_of(self._module)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters, by each of their names."""
        return {name: tuple(p.shape) for name, p in self._module.named_parameters(remove_duplicate=False)}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of the parameters, by each of their names."""
        return {name: p.dtype for name, p in self._module.named_parameters(remove_duplicate=False)}

    def owners(self, _: str) -> frozenset[int]:
        """The one stage, which owns every parameter."""
        return frozenset({0})

    def owns(self, _: str) -> bool:
        """Return True: no other rank owns a part of the module."""
        return True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Do nothing: the module lists all of its parameters anyway."""
        yield

    def forward(self, stage: int, microbatch: int, received: Payload | None, run: StepRun) -> tuple[None, Any]:
        """Run the user's step; returns None, as nothing is sent on, and what the step returned."""
        return None, run.call(stage, microbatch, is_whole=True)


Stages = Skeleton | OneStage
"""A module as the stages that one rank runs."""


def stages_of(module: nn.Module, partition: Partition, stages: tuple[int, ...], device: torch.device) -> Stages:
    """Split a module over the stages of a partition, or take over one that was split before.

    Args:
        stages: of this rank, ascending.
        device: where the rank computes.
    """
    known = Skeleton.of(module)
    if known is not None:
        return known
    return Skeleton(module, partition, stages, device) if partition.num_stages > 1 else OneStage(module)
