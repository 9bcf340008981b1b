"""Copies of the user's module to run on: the module itself stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ptdp.check.dropout import without_recurrent_dropout
from lightning_ptdp.engine.microbatches import map_tensors
from lightning_ptdp.host.lightning import trainer_of
from lightning_ptdp.own_class import put_on

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Original:
    """A user's module and batch, of which runs get copies.

    Attributes:
        module: the user's, which stays as it is.
        batch: as `training_step` gets it.
        dtype: of floating tensors in the copies; None keeps theirs.
    """

    module: pl.LightningModule
    batch: Any
    dtype: torch.dtype | None

    def make_module(self) -> pl.LightningModule:
        """Make a copy of the module on the host, built by its `configure_model`, which logs nothing.

        Recurrent modules in it drop nothing between their layers.

        Raises:
            ValueError: the module cannot be copied.
        """
        try:
            made = copy.deepcopy(self.module)
        except Exception as error:
            raise ValueError(
                f"a check runs on copies, and {type(self.module).__name__} cannot be copied: copy.deepcopy says "
                f"{type(error).__name__}: {error}; give its class a __deepcopy__, or move what cannot be copied (open "
                "files, locks, generators) out of the module"
            ) from error
        made.configure_model()
        made.to(CPU)
        if self.dtype is not None:
            made.to(self.dtype)
        made.zero_grad()
        trainer = trainer_of(self.module)
        if trainer is not None:
            made.trainer = trainer
        for child in made.modules():
            if isinstance(child, pl.LightningModule):
                _silence(child)
        without_recurrent_dropout(made)
        return made

    def make_batch(self) -> Any:
        """Make a copy of the batch, on the host."""
        return map_tensors(self.batch, lambda tensor: self._cast(tensor.detach().to(CPU, copy=True)))

    def after_transfer(self) -> Any:
        """Take the batch for one of a loader, and return it as `training_step` gets it, after transfer hooks."""
        hooks = self.make_module()
        moved = map_tensors(hooks.on_before_batch_transfer(self.batch, 0), lambda tensor: tensor.to(CPU))
        return hooks.on_after_batch_transfer(moved, 0)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    @contextmanager
    def as_default_dtype(self) -> Iterator[None]:
        """Let tensors that the module makes within the context have the dtype of the copies."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _silence(module: pl.LightningModule) -> None:
    """Give the module a class whose `log` does nothing: there is no Trainer to log to."""

    def log(self: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Nothing is logged in a check."""

    put_on(module, {"log": log})
