"""Averaged copies of the module, which callbacks make while it is whole: each rank averages what it owns.

Averages are elementwise, so a part of the copy is the average of that part. `WeightAveraging` puts its own beside the
module's state into a checkpoint, where ranks write parts. `StochasticWeightAveraging` puts it among the states of
callbacks, which rank 0 writes: there a copy's `state_dict` gathers (every rank calls it). Loading cuts what is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_ptdp.checkpoint.contents import gather_module
from lightning_ptdp.checkpoint.local_state import LocalState
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.host.lightning import average_of
from lightning_ptdp.host.torch import buffers_of, parameters_of


def split_averages(
    callbacks: Iterable[Callback], module: nn.Module, local: LocalState, groups: Groups
) -> RemovableHandle | None:
    """Leave in every averaged copy what this rank owns, with the module's values.

    Args:
        callbacks: the Trainer's, which have copied the whole module.
        module: split already.
        local: where what this rank holds lies in the whole.
        groups: of this rank.

    Returns:
        The handle of a hook on the module, which takes this rank's part of the whole states that these callbacks load
        into it during the run. None where there is no average.
    """
    copies = list(_averages(callbacks))
    for callback, copy in copies:
        _keep_owned(copy, module)
        if isinstance(callback, StochasticWeightAveraging):
            copy.register_state_dict_post_hook(_gathering(local, groups))
        copy.register_load_state_dict_pre_hook(_cutting(local))
    return module.register_load_state_dict_pre_hook(_cutting(local)) if copies else None


def refused_averages(callbacks: Iterable[Callback], *, shards: bool, has_main_weights: bool) -> list[str]:
    """Refuse averages that no checkpoint could restore; returns a sentence for each.

    Args:
        callbacks: the Trainer's.
        shards: whether replicas share the main weights out, a slice each.
        has_main_weights: whether 16-bit weights, which are averaged, have float32 main weights.
    """
    averaging = (WeightAveraging, StochasticWeightAveraging)
    return [
        f"{type(callback).__name__} averages 16-bit weights, and distributed_optimizer=True holds their float32 values "
        "in slices, which a checkpoint's average does not fit; use precision='bf16-mixed', or leave "
        "distributed_optimizer out"
        for callback in callbacks
        if shards and has_main_weights and isinstance(callback, averaging)
    ]


def _averages(callbacks: Iterable[Callback]) -> Iterator[tuple[Callback, nn.Module]]:
    for callback in callbacks:
        copy = average_of(callback)
        if copy is not None:
            yield callback, copy


def _keep_owned(copy: nn.Module, module: nn.Module) -> None:
    """Cut a copy of the whole module: what `module` does not hold goes, and the rest takes its values."""
    if _shapes(copy) == _shapes(module):
        return  # copied after the split
    for name, holder in copy.named_modules(remove_duplicate=False):
        mine = module.get_submodule(name)
        for held, owned in ((parameters_of(holder), parameters_of(mine)), (buffers_of(holder), buffers_of(mine))):
            for leaf in [leaf for leaf in held if leaf not in owned]:
                del held[leaf]
            for leaf, tensor in held.items():
                value = owned[leaf]
                if tensor is not None and value is not None:
                    tensor.data = value.detach().to(tensor, copy=True)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.shape for name, tensor in tensors}


def _gathering(local: LocalState, groups: Groups) -> Any:
    """A hook after a copy's `state_dict`: the whole state on rank 0, nothing elsewhere. Every rank calls it."""

    def gather(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        mine = {key: state.pop(key) for key in list(state) if key.startswith(prefix)}
        found = gather_module({key.removeprefix(prefix): value for key, value in mine.items()}, local, groups)
        state.update({prefix + name: value for name, value in found.items()})

    return gather


def _cutting(local: LocalState) -> Any:
    """A hook before a module's `load_state_dict`: takes this rank's part of a whole state."""

    def cut(holder: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        held = dict(holder.named_parameters(remove_duplicate=False)) | dict(
            holder.named_buffers(remove_duplicate=False)
        )
        given = {name: state.pop(prefix + name) for name in local.names if prefix + name in state}
        state.update({prefix + name: value for name, value in local.take_module(given, held).items()})

    return cut
