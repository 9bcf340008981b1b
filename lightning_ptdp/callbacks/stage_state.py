"""Python state that steps leave on a LightningModule, carried to the stages where the step did not reach it.

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.loss(batch))         # behind the model: runs on the last stage
    def on_validation_epoch_end(self):
        self.log("val", mean(self.losses)) ...       # runs on every stage

Before the hooks at the end of an epoch, the last stage sends the attributes that changed since the epoch's first batch.
*Plain data* is looked into for changes: numbers, strings, tensors, arrays, containers of them, and objects that hold
nothing else. Of anything else only another object under the name counts as a change.
"""

from __future__ import annotations

import copy
import functools
import io
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_ptdp.comm.collectives import broadcast_object
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.host.lightning import LATE_ATTRIBUTES
from lightning_ptdp.host.torch import version_of

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OPAQUE = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


class StageState(Callback):
    """Carries the state of a pipeline's last stage to the others, before other callbacks' and the module's hooks."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._before: dict[str, dict[str, Trace]] = {}

    def _begin(self, loop: str, module: pl.LightningModule) -> None:
        if self._groups.is_last_pipeline_rank and loop not in self._before:
            self._before[loop] = {name: trace(value) for name, value in state_of(module).items()}

    def _carry(self, loop: str, module: pl.LightningModule) -> None:
        before, parcel = self._before.pop(loop, None), Parcel()
        if before is not None:
            parcel = Parcel.of(changes(before, state_of(module)))
        parcel = broadcast_object(parcel, self._groups.pipeline_ranks[-1], self._groups.pipeline)
        if parcel.stuck:
            rank_zero_warn(
                f"steps put values into the attributes {list(parcel.stuck)} that pickle cannot save, so they cannot go "
                "to the pipeline's other stages, whose hooks at the end of the epoch see what they had before; "
                "keep numbers, strings, tensors, and lists, dicts and objects of them there if those hooks use them"
            )
        if not self._groups.is_last_pipeline_rank:
            parcel.unpack_into(module, self._device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Note the state before the first batch."""
        self._begin("train", pl_module)

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Note the state before the first batch."""
        self._begin("validation", pl_module)

    def on_test_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Note the state before the first batch."""
        self._begin("test", pl_module)

    def on_predict_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Note the state before the first batch."""
        self._begin("predict", pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Carry what changed."""
        self._carry("train", pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Carry what changed."""
        self._carry("validation", pl_module)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Carry what changed."""
        self._carry("test", pl_module)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Carry what changed."""
        self._carry("predict", pl_module)


def state_of(module: pl.LightningModule) -> dict[str, Any]:
    """A module's attributes that are its author's own: no parameters, buffers, modules, nor what Lightning keeps."""
    return {name: value for name, value in vars(module).items() if name not in _lightnings_own()}


@functools.cache
def _lightnings_own() -> frozenset[str]:
    return frozenset(vars(pl.LightningModule())) | LATE_ATTRIBUTES


@dataclass(frozen=True)
class Trace:
    """What a value looked like; two traces are equal if it did not change.

    tokens: plain values, and the identities and counts of edits of what lies within. held: what is named by identity,
    kept so that no identity is reused.
    """

    tokens: list[Any]
    held: list[Any] = field(compare=False)


class _NotPlainError(Exception):
    """An object holds something else than plain data."""


def trace(value: Any) -> Trace:
    """Take down what a value looks like, to compare it by later."""
    found = Trace([], [])
    _trace(value, found, set(), within_object=False)
    return found


def _trace(value: Any, found: Trace, seen: set[int], *, within_object: bool) -> None:
    if isinstance(value, _SCALARS):
        found.tokens.append((type(value), value))
        return
    found.tokens.append(id(value))
    found.held.append(value)
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        # Inference tensors keep no count of edits, and are taken for changed.
        found.tokens.append(object() if value.is_inference() else version_of(value))
    elif isinstance(value, np.ndarray):
        found.tokens.append(object() if value.dtype.hasobject else value.tobytes())
    elif isinstance(value, Mapping):
        found.tokens.append(len(value))
        for key, item in value.items():
            _trace(key, found, seen, within_object=within_object)
            _trace(item, found, seen, within_object=within_object)
    elif isinstance(value, _SEQUENCES):
        found.tokens.append(len(value))
        for item in value:
            _trace(item, found, seen, within_object=within_object)
    elif isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        if within_object:
            raise _NotPlainError
    else:
        _trace_object(value, found, seen, within_object=within_object)


def _trace_object(value: Any, found: Trace, seen: set[int], *, within_object: bool) -> None:
    inside, been = Trace([], []), set(seen)
    try:
        for name, item in vars(value).items():
            inside.tokens.append(name)
            _trace(item, inside, been, within_object=True)
    except _NotPlainError:
        if within_object:
            raise
        return
    found.tokens.extend(inside.tokens)
    found.held.extend(inside.held)
    seen.update(been)


def changes(before: Mapping[str, Trace], now: Mapping[str, Any]) -> dict[str, Any]:
    """Find the values that are new or differ from their trace; `Parcel.GONE` stands for those that are no more."""
    changed = {name: value for name, value in now.items() if name not in before or trace(value) != before[name]}
    return changed | {name: Parcel.GONE for name in before if name not in now}


@dataclass(frozen=True)
class Parcel:
    """Attributes on their way. content: what torch.save made of them. stuck: names of those that cannot be saved."""

    GONE = "lightning_ptdp: the attribute was deleted"

    content: bytes = b""
    stuck: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Parcel:
        """All values in one piece, so that what they share stays shared."""
        if not values:
            return cls()
        try:
            return cls(_saved(dict(values)))
        except Exception:  # of the user's own classes, so any kind
            fit = {name: value for name, value in values.items() if _can_be_saved(value)}
            return cls(_saved(fit), tuple(name for name in values if name not in fit))

    def unpack_into(self, module: nn.Module, device: torch.device) -> None:
        """Set the attributes; lists, dicts and sets stay the same objects, filled anew."""
        if not self.content:
            return

        def moved(storage: Any, location: str) -> Any:
            return storage if location == "cpu" else storage.to(device=device)

        values = torch.load(io.BytesIO(self.content), map_location=moved, weights_only=False)
        for name, value in values.items():
            if isinstance(value, str) and value == self.GONE:
                vars(module).pop(name, None)
            elif not _refill(vars(module).get(name), value):
                setattr(module, name, value)


def _saved(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def _can_be_saved(value: Any) -> bool:
    try:
        _saved(value)
    except Exception:
        return False
    return True


def _refill(target: Any, value: Any) -> bool:
    """Give a container the content of another of its kind; False if it is none."""
    if type(target) is not type(value):
        return False
    if isinstance(target, list):
        target[:] = value
    elif isinstance(target, dict | set):
        target.clear()
        target.update(value)
    elif isinstance(target, deque) and target.maxlen == value.maxlen:
        target.clear()
        target.extend(value)
    else:
        return False
    return True


@contextmanager
def state_set_aside(module: pl.LightningModule) -> Iterator[None]:
    """Within, steps work on copies of the module's state; afterwards it is what it was."""
    state = state_of(module)
    plain = {name: value for name, value in state.items() if not isinstance(value, _OPAQUE) and _is_plain(value)}
    vars(module).update(copy.deepcopy(plain, dict(_members(plain.values()))))
    try:
        yield
    finally:
        for name in state_of(module).keys() - state.keys():
            del vars(module)[name]
        vars(module).update(state)


def _is_plain(value: Any) -> bool:
    try:
        _trace(value, Trace([], []), set(), within_object=True)
    except _NotPlainError:
        return False
    return True


def _members(values: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Tensors that need no copy, by identity: members of sequences, which steps extend, and those with a graph."""
    for value in values:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield id(value), value
        elif isinstance(value, Mapping):
            yield from _members(value.values())
        elif isinstance(value, _SEQUENCES):
            yield from ((id(item), item) for item in value if isinstance(item, Tensor))
            yield from _members(value)
