"""The mode under which tensors are made without values, and what happens to them is logged."""

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

LIMIT_BYTES = 64 << 20  # of values that come from elsewhere, which every rank must hold whole

_REMEDY = (
    "leave it out of configure_model (weights are loaded by fit(ckpt_path=...), which reads what a rank owns), or use "
    "init='plain'"
)
_META, _HOST = torch.device("meta"), torch.device("cpu")
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# Former values don't matter where these write a whole storage.
_OVERWRITING = {
    *("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"),
    *("zero_", "fill_", "copy_"),
}
# They change what a storage is.
_REFUSED = {"set_", "resize_", "resize_as_"}


class Recorder(TorchDispatchMode):
    """Within, new tensors are on the meta device, and the log says what they would hold.

    Random operations draw from a stream of their own each, named by its ordinal in the run's seed. Tensors that hold
    values (made before, or by torch.tensor from Python's numbers) keep them, and operations on them alone run at once;
    so does what needs values to go on, such as `item`, on values computed for it.
    """

    def __init__(self, log: Log, seed: int) -> None:
        """seed: of the run, the same on every rank."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._seed = log, seed
        self._num_draws = 0
        self.is_inside = False  # its own code runs, to which tensors are what they are

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_inside:
            return func(*args, **kwargs or {})
        with self._inside():
            return self._answer(func, args, kwargs or {})

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def _answer(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        """A tensor's values, computed now where it holds none.

        Raises:
            ValueError: the log does not know them.
        """
        with self._inside():
            return self._value(tensor)

    def defers(self, tensor: Tensor) -> bool:
        """Whether a tensor holds no values."""
        with self._inside():
            return tensor.is_meta

    def initialise(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Log a random initialisation of a tensor as one operation, though it is a function of many."""
        if not self.defers(tensor):
            return function(tensor, *args, **kwargs)
        with self._inside():
            setting = Setting(torch.get_default_dtype(), self._next_seed(function.__name__, kwargs))
            if not self._log.knows(tensor):
                self._log.allocate(tensor)
            key, region = frozenset({_key(tensor)}), region_of(tensor)
            reads = frozenset[StorageWeakRef]() if _is_whole(tensor) else key
            self._log.add(Operation(function, (region, *args), kwargs, setting, reads, key, (None,)))
        return tensor

    def _value(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        self._check_known(tensor)
        return self._log.value(region_of(tensor))

    def _next_seed(self, name: str, kwargs: dict[str, Any]) -> int:
        """The seed of a random operation."""
        if kwargs.get("generator") is not None:
            raise ValueError(
                f"{name} draws from a generator of its own, whose state depends on all that was drawn before, and "
                "under init='by_operation' each operation draws alone; leave generator= out, or use init='plain'"
            )
        self._num_draws += 1
        return mix(self._seed, self._num_draws)

    def _run(self, func: OpOverload[..., Any], args: Any, kwargs: Any, setting: Setting) -> Any:
        """Run an operation at once, on values."""
        args, kwargs = pytree.tree_map_only(Tensor, self._value, (args, kwargs))
        with setting():
            return func(*args, **_on(_HOST, func, kwargs))

    def _record(
        self, func: OpOverload[..., Any], args: Any, kwargs: Any, setting: Setting, written: list[Tensor]
    ) -> Any:
        """Run an operation in shapes, and log it."""
        args, kwargs = pytree.tree_map_only(Tensor, self._without_values, (args, kwargs))
        returned = func(*args, **_on(_META, func, kwargs))
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = {_key(tensor) for tensor in inputs}
        outputs = [leaf if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(returned)]
        new = [leaf if leaf is not None and _key(leaf) not in here else None for leaf in outputs]
        if not written and not any(leaf is not None for leaf in new):
            return returned  # a view
        replaced = {_key(t) for t in written if _name(func) in _OVERWRITING and _is_whole(t)}
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
        """A tensor that holds values, as one that is known to hold them."""
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
    """A list less one occurrence of each of others."""
    left = list(tensors)
    for other in others:
        del left[next(i for i, tensor in enumerate(left) if tensor is other)]
    return left


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor covers its storage."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _on(device: torch.device, func: OpOverload[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for another device."""
    names = {argument.name for argument in schema_of(func).arguments}
    moved = dict(kwargs)
    if "device" in names:
        moved["device"] = device
    if "pin_memory" in names:
        moved["pin_memory"] = False
    return moved
