"""Lets a second forward start where the first one did, besides its inputs, and leave no trace.

    first forward     a `Beginning` notes where something stands, the forward runs, and `Moment.end` forgets what the
                      forward did not change
    second forward    `Moment.again` goes back to what was noted; afterwards all returns to where it stood before

There is a beginning for each thing that a forward may read besides its inputs: random generators, buffers and
attributes of modules, the default dtype, modes of functions.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_ptdp.generators import HostState, drawing_from, generators, states_of
from lightning_ptdp.host.torch import BatchOrInstanceNorm, buffers_of, function_modes, version_of

_running = threading.local()
_CONTAINERS = (list, dict, set, deque)
_FRAMEWORKS = frozenset(vars(nn.Module()))
_ABSENT = object()


class Moment(Protocol):
    """Where something stood when a first forward began."""

    def end(self) -> None:
        """Forget what the first forward did not change, now that it is over: no second one has to go back to it."""

    def again(self) -> AbstractContextManager[None]:
        """Go back for a second forward: within the context it stands there again, afterwards where it stood before."""


Beginning = Callable[[], Moment]
"""Called before a first forward; notes where something stands."""


def is_recomputing() -> bool:
    """Whether this thread runs a second forward: what that does besides computing, the first one has done already."""
    return getattr(_running, "depth", 0) > 0


class FirstForward:
    """The context of a first forward, whose moments were noted before it: ends them when it is over."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._moments = moments

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        for moment in self._moments:
            moment.end()


class SecondForward:
    """The context of a second forward, within which all moments stand again.

    It is entered more than once if backward runs again through the same graph (`retain_graph=True`).
    """

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._moments = moments
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        self._stacks.append(stack)
        for moment in self._moments:
            stack.enter_context(moment.again())
        _running.depth = getattr(_running, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _running.depth -= 1
        self._stacks.pop().close()


class DefaultDtype:
    """The dtype of new tensors: a precision plugin changes it around the user's step, and backward runs outside."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()

    def end(self) -> None:
        """Keep it: whether it changes before the second forward is not known yet."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Make new tensors of the dtype that they had in the first forward."""
        present = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(present)


class FunctionModes:
    """The modes (`TorchFunctionMode`) that operations pass through, such as the one of a default device.

    `Tensor.backward` passes through them, too, and a mode is off while it handles a call. So it would be off for the
    second forward, which runs within backward.
    """

    def __init__(self) -> None:
        self._modes = function_modes()

    def end(self) -> None:
        """Keep them: whether they are off in the second forward is not known yet."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Enter those of the first forward's modes that are off, if all others are the same."""
        present = function_modes()
        with ExitStack() as stack:
            if self._modes[: len(present)] == present:
                for mode in self._modes[len(present) :]:
                    stack.enter_context(mode)
            yield


class Draws:
    """Where PyTorch's default generators stood, of the host and of a device."""

    def __init__(self, device: torch.device) -> None:
        self._states = states_of(generators(device))

    def end(self) -> None:
        """Keep the states of those generators only that the forward drew from: one takes 5 kB on a CPU."""
        self._states = [(g, state) for g, state in self._states if not torch.equal(state, g.get_state())]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers again."""
        with drawing_from(self._states):
            yield


class HostDraws:
    """Notes where Python's and NumPy's generators stand, if blocks draw from them.

    To read their states takes longer than to run a small layer, and blocks seldom draw from them. So the first forward
    of all tells: if it did not move them, later forwards are taken not to.
    """

    def __init__(self) -> None:
        self._draws: bool | None = None

    def begin(self) -> Moment:
        """Note where they stand, unless forwards are known not to draw from them."""
        return _NoMoment() if self._draws is False else _HostMoment(self)

    def tell(self, *, draws: bool) -> None:
        """Take note of whether a forward drew from them."""
        self._draws = self._draws or draws


class _HostMoment:
    """Where Python's and NumPy's generators stood."""

    def __init__(self, owner: HostDraws) -> None:
        self._owner, self._state = owner, HostState()

    def end(self) -> None:
        self._owner.tell(draws=HostState() != self._state)

    @contextmanager
    def again(self) -> Iterator[None]:
        present = HostState()
        self._state.go_back()
        try:
            yield
        finally:
            present.go_back()


class _NoMoment:
    """Nothing was noted, and nothing is gone back to."""

    def end(self) -> None:
        pass

    @contextmanager
    def again(self) -> Iterator[None]:
        yield


class ModuleState:
    """Buffers and plain attributes of modules, such as running statistics and counters.

    The second forward begins with the values that the first one found, and works on copies of them, so that statistics
    move once a batch.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._notes = [_Note(store, owner) for owner in modules for store in _stores(owner)]

    def end(self) -> None:
        """Keep the former values of what the forward changed."""
        for note in self._notes:
            note.end()
        self._notes = [note for note in self._notes if note.changed]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the modules the noted values, and afterwards those that they have at present."""
        present = [(store, dict(store)) for owner in self._modules for store in _stores(owner)]
        for owner in self._modules:
            buffers_of(owner).update({name: _copied(buffer) for name, buffer in buffers_of(owner).items()})
        for note in self._notes:
            note.put_back()
        try:
            yield
        finally:
            for store, values in present:
                if not _are_same(store, values):
                    store.clear()
                    store.update(values)


def _stores(owner: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a module holds its buffers and its attributes."""
    return [buffers_of(owner), vars(owner)] if buffers_of(owner) else [vars(owner)]


class _Note:
    """What one dict of a module held before a forward.

    changed: once the forward is over, the former values of the entries that it replaced, edited in place or removed;
    `_ABSENT` for those that it added.
    """

    def __init__(self, store: dict[str, Any], owner: nn.Module) -> None:
        self._store, self._before = store, dict(store)
        self._is_norm = store is buffers_of(owner) and isinstance(owner, BatchOrInstanceNorm) and owner.training
        self._editable = {
            name: (_copied(value), _mark(value))
            for name in store.keys() - _FRAMEWORKS
            if isinstance(value := store[name], Tensor) or type(value) in _CONTAINERS
        }
        self.changed: dict[str, Any] = {}

    def end(self) -> None:
        store, before = self._store, self._before
        copies = {name: copy for name, (copy, _) in self._editable.items()}
        if self._is_norm:  # batch norms edit their statistics without counting it in the tensors' versions
            self.changed = copies
        else:
            self.changed = {n: copies[n] for n, (_, mark) in self._editable.items() if _mark(before[n]) != mark}
        if not _are_same(store, before):
            self.changed |= {n: copies.get(n, v) for n, v in before.items() if store.get(n, _ABSENT) is not v}
            self.changed |= dict.fromkeys(store.keys() - before.keys(), _ABSENT)
        self._before, self._editable = {}, {}

    def put_back(self) -> None:
        for name, value in self.changed.items():
            if value is _ABSENT:
                self._store.pop(name, None)
            else:
                self._store[name] = _copied(value)


def _are_same(store: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether a store holds the same objects under the same names, in order."""
    return list(store) == list(values) and all(map(operator.is_, store.values(), values.values()))


def _copied(value: Any) -> Any:
    """A copy of what a forward may edit in place (a container, a tensor without gradient); all else as it is."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    return value.copy() if type(value) in _CONTAINERS else value


def _mark(value: Any) -> Any:
    """What to compare before and after a forward, which differs if it edited the value in place.

    For a tensor its count of edits, for a container the identities of what it holds.
    """
    if isinstance(value, Tensor):
        return None if value.is_inference() else version_of(value)
    return [*map(id, value), *map(id, value.values())] if type(value) is dict else [*map(id, value)]
