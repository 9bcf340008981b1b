"""A module that is built without values, until its parts are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_ptdp.deferred_init.illusion import illusion
from lightning_ptdp.deferred_init.log import Log, StorageRegion, region_of
from lightning_ptdp.deferred_init.recorder import LIMIT_BYTES, Recorder
from lightning_ptdp.host.torch import REGISTRIES, buffers_of, pytree
from lightning_ptdp.names import first_few, join
from lightning_ptdp.pipeline.hollow import nan_like

_HOST = torch.device("cpu")


class DeferredInit:
    """Knows the values that a module's `configure_model` would have given it, and computes them on demand.

    Build the module within `recording`: its tensors are then on the meta device. Next, `make_hollow` fills all
    parameters with NaN. Then ask `take` for the value of each parameter that is cut, and let `fill` give the other
    tensors that this rank owns their values.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        """
        Args:
            module: the user's, before its `configure_model` has run.
            seed: of the run, the same on every rank.
        """
        self._log = Log()
        self._recorder = Recorder(self._log, seed)
        self._earlier = list(_tensors(module).values())
        self._waiting: dict[nn.Parameter, StorageRegion] = {}
        self._storages: dict[StorageWeakRef, UntypedStorage] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Put off operations on new tensors while the context lasts; `configure_model` runs within it."""
        try:
            with self._recorder, illusion(self._recorder):
                yield
        except Exception as error:
            error.add_note(
                "raised under init='by_operation', where tensors are on the meta device while configure_model runs: "
                "files cannot be loaded into them, and code outside of torch cannot read them; keep such out of "
                "configure_model, or use init='plain'"
            )
            raise

    @property
    def digest(self) -> str:
        """A hash of the recorded operations, to compare with other ranks."""
        return self._log.digest

    def faults(self, module: nn.Module) -> list[str]:
        """Find what is wrong with a module that `configure_model` has built; returns a sentence for each fault."""
        tensors = _tensors(module)
        if not any(self._log.knows(tensor) for tensor in tensors.values()):
            return [
                "init='by_operation' puts off what configure_model builds, and it built no parameter or buffer; move "
                "the model from __init__ to configure_model, or use init='plain'"
            ]
        faults = []
        empty = [name for name, tensor in tensors.items() if tensor.is_meta and not self._log.knows(tensor)]
        if empty:
            faults.append(
                f"{_listed(empty)} were built on the meta device outside of configure_model, and nothing gave them "
                "values; build them in configure_model, without a device"
            )
        earlier = {id(tensor) for tensor in self._earlier}
        held = {name: t for name, t in tensors.items() if not t.is_meta and id(t) not in earlier}
        size = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
        if size > LIMIT_BYTES:
            faults.append(
                f"configure_model gave {_listed(list(held))} values that no operation of torch made (loaded weights, "
                f"numpy arrays), {size >> 20} MiB that every rank holds whole, and init='by_operation' allows "
                f"{LIMIT_BYTES >> 20} MiB; load weights by fit(ckpt_path=...), which reads what a rank owns, or use "
                "init='plain'"
            )
        return faults

    def make_hollow(self, module: nn.Module) -> None:
        """Fill the parameters with NaN that takes no memory; they stay the same objects."""
        for parameter in module.parameters():
            if self._log.knows(parameter):
                self._waiting[parameter] = region_of(parameter)
                _make_hollow(parameter)

    def abandon(self, module: nn.Module) -> None:
        """Fill what is on the meta device with NaN, for a module that will not get its values but is moved yet."""
        for parameter in module.parameters():
            if parameter.is_meta:
                _make_hollow(parameter)
        for child in module.modules():
            for name, buffer in buffers_of(child).items():
                if buffer is not None and buffer.is_meta:
                    buffers_of(child)[name] = nan_like(buffer, _HOST)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """Compute the whole value of a parameter, in memory of its own; if it has a value already, return that."""
        region = self._waiting.pop(parameter, None)
        return parameter.data if region is None else self._log.value(region)

    def fill(self, module: nn.Module, owns: Callable[[str], bool]) -> None:
        """Give all tensors of a module their values, except those that `take` has handed out.

        Args:
            module: has this rank's parameters and buffers.
            owns: tells of a full name whether this rank needs the tensor; asked for tensors in ordinary attributes.
        """
        for parameter in module.parameters():
            region = self._waiting.pop(parameter, None)
            if region is not None:
                parameter.data = self._shared(region)
        done: dict[int, tuple[Tensor, Tensor]] = {}  # holds the former tensor, so that no other gets its identity

        def filled(tensor: Tensor) -> Tensor:
            if not self._log.knows(tensor):
                return tensor
            if id(tensor) not in done:
                value = self._shared(region_of(tensor)).requires_grad_(tensor.requires_grad)
                done[id(tensor)] = tensor, nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
            return done[id(tensor)][1]

        for path, child in module.named_modules():
            for name, buffer in buffers_of(child).items():
                if buffer is not None:
                    buffers_of(child)[name] = filled(buffer)
            for name, value in vars(child).items():
                if name not in REGISTRIES and self._holds_deferred(value) and owns(join(path, name)):
                    vars(child)[name] = pytree.tree_map_only(Tensor, filled, value)
        self._waiting.clear()

    def _shared(self, region: StorageRegion) -> Tensor:
        """The value of a region, in a storage that is computed once for all of its regions: views stay views."""
        if region.storage not in self._storages:
            self._storages[region.storage] = self._log.value(region).untyped_storage()
        return region.on(self._storages[region.storage])

    def _holds_deferred(self, value: Any) -> bool:
        """Whether an attribute is or contains a tensor whose values were put off."""
        if not isinstance(value, Tensor | list | tuple | dict):
            return False
        return any(isinstance(leaf, Tensor) and self._log.knows(leaf) for leaf in pytree.tree_leaves(value))


def _make_hollow(parameter: nn.Parameter) -> None:
    """Fill a parameter on the meta device with NaN on the host that takes no memory; it stays the same object."""
    hollow = nn.Parameter(nan_like(parameter, _HOST), parameter.requires_grad)
    hollow.__class__ = type(parameter)
    hollow.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, hollow)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _listed(names: list[str]) -> str:
    return first_few(map(repr, names))
