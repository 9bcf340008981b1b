"""The dispatch mode under which tensors are made without values, and what happens to them is logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ptdp.deferred_init.log import Log, Operation, Setting, region_of
from lightning_ptdp.host.torch import OpOverload, TorchDispatchMode, pytree, schema_of
from lightning_ptdp.random_streams import mix
from lightning_ptdp.regions import edited

LIMIT_BYTES = 64 << 20  # at most, of values that come from elsewhere, since every rank must hold them whole

_REMEDY = (
    "leave it out of configure_model (weights are loaded by fit(ckpt_path=...), which reads what a rank owns), or use "
    "init='plain'"
)
_META, _HOST = torch.device("meta"), torch.device("cpu")
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# If these write a whole storage, its former values don't matter.
_OVERWRITING = {
    *("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"),
    *("zero_", "fill_", "copy_"),
}
# These give a tensor another storage, or its storage another size.
_REFUSED = {"set_", "resize_", "resize_as_"}


class Recorder(TorchDispatchMode):
    """A mode within which new tensors are on the meta device, and the log is told what they would hold.

    Each random operation draws from a stream of its own, seeded by the run's seed and by its number among them.

    Some operations run at once. Tensors that hold values (made before, or by torch.tensor from Python's numbers) keep
    them, and operations on such tensors alone are not put off. An operation that needs values to go on, such as `item`,
    runs on values that are computed for it.
    """

    def __init__(self, log: Log, seed: int) -> None:
        """
        Args:
            log: is told of operations.
            seed: of the run, the same on every rank.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._seed = log, seed
        self._num_draws = 0
        self.is_inside = False  # whether the recorder's own code runs, which sees tensors as they are

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_inside:
            return func(*args, **kwargs or {})
        with self._inside():
            return self._answer(func, args, kwargs or {})

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Let operations within the context pass through, since they are the recorder's own."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def _answer(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation at once or put it off, and return what it returns.

        Raises:
            ValueError: it gives a tensor another storage, reads values that nobody knows, or draws from a generator
                that the user made.
        """
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        setting = Setting(torch.get_default_dtype(), self._next_seed(str(func), kwargs) if draws else None)
        if tensors and not any(tensor.is_meta for tensor in tensors):
            with setting():
                return func(*args, **kwargs)
        if _name(func) in _REFUSED:
            raise ValueError(
                f"{func} gives a tensor other storage, as loading from a file does, and init='by_operation' keeps no "
                f"values while configure_model runs; {_REMEDY}"
            )
        written = edited(func, args, kwargs)
        needs_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if needs_values or not all(tensor.is_meta for tensor in written):
            return self._run(func, args, kwargs, setting)
        return self._record(func, args, kwargs, setting, written)

    def value(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values, computed now if it holds none.

        Raises:
            ValueError: the log does not know them.
        """
        with self._inside():
            return self._value(tensor)

    def defers(self, tensor: Tensor) -> bool:
        """Whether a tensor holds no values, since what makes them is put off."""
        with self._inside():
            return tensor.is_meta

    def initialise(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Log a random initialisation of a tensor as one operation, though the function runs many.

        A tensor that holds values is initialised at once.
        """
        if not self.defers(tensor):
            return function(tensor, *args, **kwargs)
        with self._inside():
            setting = Setting(torch.get_default_dtype(), self._next_seed(function.__name__, kwargs))
            if not self._log.knows(tensor):
                self._log.allocate(tensor)
            key, region = frozenset({_key(tensor)}), region_of(tensor)
            reads = frozenset[StorageWeakRef]() if _fills_storage(tensor) else key
            self._log.add(Operation(function, (region, *args), kwargs, setting, reads, key, (None,)))
        return tensor

    def _value(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        self._check_known(tensor)
        return self._log.value(region_of(tensor))

    def _next_seed(self, name: str, kwargs: dict[str, Any]) -> int:
        """Return the seed of the next random operation.

        Args:
            name: of the operation, for the error.
            kwargs: its keyword arguments.

        Raises:
            ValueError: the operation draws from a generator that the user made.
        """
        if kwargs.get("generator") is not None:
            raise ValueError(
                f"{name} draws from a generator of its own, whose state depends on all that was drawn before, and "
                "under init='by_operation' each operation draws alone; leave generator= out, or use init='plain'"
            )
        self._num_draws += 1
        return mix(self._seed, self._num_draws)

    def _run(self, func: OpOverload[..., Any], args: Any, kwargs: Any, setting: Setting) -> Any:
        """Run an operation at once, on the values of its arguments."""
        args, kwargs = pytree.tree_map_only(Tensor, self._value, (args, kwargs))
        with setting():
            return func(*args, **_on(_HOST, func, kwargs))

    def _record(
        self, func: OpOverload[..., Any], args: Any, kwargs: Any, setting: Setting, written: list[Tensor]
    ) -> Any:
        """Run an operation on the meta device, where it has shapes only, and log it.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its keyword arguments.
            setting: the default dtype, and the seed of a random operation.
            written: the tensors among the arguments that it writes.
        """
        args, kwargs = pytree.tree_map_only(Tensor, self._without_values, (args, kwargs))
        returned = func(*args, **_on(_META, func, kwargs))
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = {_key(tensor) for tensor in inputs}
        outputs = [leaf if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(returned)]
        new = [leaf if leaf is not None and _key(leaf) not in here else None for leaf in outputs]
        if not written and not any(leaf is not None for leaf in new):
            return returned  # a view
        replaced = {_key(t) for t in written if _name(func) in _OVERWRITING and _fills_storage(t)}
        reads = {_key(tensor) for tensor in _without(inputs, written)} | {_key(tensor) for tensor in written} - replaced
        for tensor in inputs:
            if _key(tensor) in reads:
                self._check_known(tensor)
        for leaf in (*written, *new):
            if leaf is not None and not self._log.knows(leaf):
                self._log.allocate(leaf)
        if _name(func) in _ALLOCATIONS:
            return returned
        regions = tuple(None if leaf is None else region_of(leaf) for leaf in new)
        writes = {_key(tensor) for tensor in written} | {region.storage for region in regions if region is not None}
        args, kwargs = pytree.tree_map_only(Tensor, region_of, (args, _on(_HOST, func, kwargs)))
        self._log.add(Operation(func, args, kwargs, setting, frozenset(reads), frozenset(writes), regions))
        return returned

    def _without_values(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the meta device that the log knows the values of, for one that holds them.

        Raises:
            ValueError: the log would hold more than `LIMIT_BYTES` of such values.
        """
        if tensor.is_meta:
            return tensor
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        stand_in = torch.empty(value.shape, dtype=value.dtype, device=_META)
        self._log.allocate(stand_in, value)
        if self._log.constant_bytes > LIMIT_BYTES:
            raise ValueError(
                f"configure_model copies values from tensors that were made elsewhere (the last one of shape "
                f"{list(tensor.shape)}), {self._log.constant_bytes >> 20} MiB by now, and every rank would hold them "
                f"all: init='by_operation' allows {LIMIT_BYTES >> 20} MiB; {_REMEDY}"
            )
        return stand_in

    def _check_known(self, tensor: Tensor) -> None:
        if not self._log.knows(tensor):
            raise ValueError(
                f"configure_model reads a tensor of shape {list(tensor.shape)} that was built on the meta device "
                "before and holds no values; build it in configure_model, or fill it there first"
            )


def _name(func: OpOverload[..., Any]) -> str:
    return schema_of(func).name.partition("::")[2]


def _key(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _without(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Take each tensor of a second list out of the first one once."""
    left = list(tensors)
    for other in others:
        del left[next(i for i, tensor in enumerate(left) if tensor is other)]
    return left


def _fills_storage(tensor: Tensor) -> bool:
    """Whether a tensor covers all of its storage, in order."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _on(device: torch.device, func: OpOverload[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operation's keyword arguments with another device, if it takes one."""
    names = {argument.name for argument in schema_of(func).arguments}
    moved = dict(kwargs)
    if "device" in names:
        moved["device"] = device
    if "pin_memory" in names:
        moved["pin_memory"] = False
    return moved
