"""What a forward starts from, besides its inputs: the second one starts there too, and leaves no trace.

first forward    begin: note     run     end: forget what did not change
second forward   go back to what was noted, run, and return to where things stood
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
    """Where something stood when a forward began."""

    def end(self) -> None:
        """The forward is over: forget what it did not change."""

    def again(self) -> AbstractContextManager[None]:
        """Within, it stands there again; afterwards where it stood before."""


Beginning = Callable[[], Moment]
"""Notes where something stands."""


def is_recomputing() -> bool:
    """Whether this thread is in a second forward, whose side effects were had before."""
    return getattr(_running, "depth", 0) > 0


class First:
    """Around a first forward."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._moments = moments

    def __enter__(self) -> None:
        """Moments were noted before."""

    def __exit__(self, *_: object) -> None:
        for moment in self._moments:
            moment.end()


class Again:
    """Around a second forward; a graph that is kept has several."""

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
    """Of new tensors: a step in 16 or 64 bits changes it, and its backward runs outside."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()

    def end(self) -> None:
        """It is needed again."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Make tensors as in the first forward."""
        present = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(present)


class FunctionModes:
    """Of operations, such as a default device. `backward` is one itself: the modes that see it leave for its time."""

    def __init__(self) -> None:
        self._modes = function_modes()

    def end(self) -> None:
        """They are needed again."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Enter those that have left since."""
        present = function_modes()
        with ExitStack() as stack:
            if self._modes[: len(present)] == present:
                for mode in self._modes[len(present) :]:
                    stack.enter_context(mode)
            yield


class Draws:
    """PyTorch's default generators, of those that the forward drew from."""

    def __init__(self, device: torch.device) -> None:
        self._states = states_of(generators(device))

    def end(self) -> None:
        """Keep no state that was not moved: it is 5 kB on a CPU."""
        self._states = [(g, state) for g, state in self._states if not torch.equal(state, g.get_state())]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same again."""
        with drawing_from(self._states):
            yield


class HostDraws:
    """Makes moments of Python's and NumPy's generators, whose states take longer to read than a small layer to run.

    Blocks seldom draw from them: they are followed where the first forward of all did.
    """

    def __init__(self) -> None:
        self._draws: bool | None = None

    def begin(self) -> Moment:
        """Note where they stand, if that may matter."""
        return _NoMoment() if self._draws is False else _HostMoment(self)

    def tell(self, *, draws: bool) -> None:
        """Whether a forward drew from them."""
        self._draws = self._draws or draws


class _HostMoment:
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
    def end(self) -> None:
        pass

    @contextmanager
    def again(self) -> Iterator[None]:
        yield


class ModuleState:
    """Buffers and plain attributes of modules, such as running statistics and counters.

    The second forward begins with those that the first one found, and works on copies.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._notes = [_Note(store, owner) for owner in modules for store in _stores(owner)]

    def end(self) -> None:
        """Keep what changed."""
        for note in self._notes:
            note.end()
        self._notes = [note for note in self._notes if note.changed]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put the noted values in place, and afterwards the present ones."""
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
    """Where a module holds buffers and attributes."""
    return [buffers_of(owner), vars(owner)] if buffers_of(owner) else [vars(owner)]


class _Note:
    """The values of one store. changed: those that the forward found in what it then replaced or edited."""

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
        if self._is_norm:  # edits its statistics without a trace
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
    """What a forward may edit in place: a copy of it. Anything else is itself."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    return value.copy() if type(value) in _CONTAINERS else value


def _mark(value: Any) -> Any:
    """Differs where a value was edited in place."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else version_of(value)
    return [*map(id, value), *map(id, value.values())] if type(value) is dict else [*map(id, value)]
