"""A checkpoint's contents: from the nested dict of the Trainer to named values of this rank, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_ptdp.checkpoint.folder import Keys
from lightning_ptdp.checkpoint.local_state import LocalState
from lightning_ptdp.checkpoint.rectangles import Located
from lightning_ptdp.checkpoint.single import gather_whole
from lightning_ptdp.checkpoint.writers import assign_writers
from lightning_ptdp.comm.collectives import gather_objects
from lightning_ptdp.comm.groups import Groups


@dataclass(frozen=True)
class Contents:
    """What this rank contributes to a checkpoint.

    tensors, objects: those that this rank writes, and no other. rest: everything else; rank 0's is saved.
    order: the names of the plain model, in its order.
    """

    tensors: Mapping[Keys, Located]
    objects: Mapping[Keys, Any]
    rest: Mapping[str, Any]
    order: Sequence[str]

    def copied(self) -> Contents:
        """A copy in host memory of its own, which training does not change."""
        tensors = {keys: located.copied() for keys, located in self.tensors.items()}
        return replace(
            self, tensors=tensors, objects=copy.deepcopy(dict(self.objects)), rest=copy.deepcopy(dict(self.rest))
        )


def contents_of(checkpoint: Mapping[str, Any], local: LocalState, groups: Groups) -> Contents:
    """Take a checkpoint apart; every rank of the world calls it.

    checkpoint: as the Trainer dumped it, with this rank's state in it.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    tensors, objects = local.module_entries(checkpoint["state_dict"])
    for key in [key for key, value in rest.items() if _is_of_the_model(value, local.names)]:
        more, others = local.module_entries(rest.pop(key), top=key)
        tensors |= more
        objects |= others
    for number, state in enumerate(checkpoint.get("optimizer_states", ())):
        more, others = local.optimizer_entries(number, state)
        tensors |= more
        objects |= others
        if not any(gather_objects(bool(state["state"]), groups.world)):
            objects[f"optimizer_{number}", "state"] = {}
    return Contents(*assign_writers(tensors, objects, groups), rest, local.names)


def _is_of_the_model(value: Any, names: Sequence[str]) -> bool:
    """Whether a value of a checkpoint is another state of the module, such as one before averaging."""
    return isinstance(value, Mapping) and bool(value) and set(value) <= set(names)


def gather_module(state: Mapping[str, Any], local: LocalState, groups: Groups) -> dict[str, Any]:
    """Gather a whole state of the module from the parts of all ranks, in the memory of rank 0; empty elsewhere."""
    tensors, objects = assign_writers(*local.module_entries(state), groups)
    return gather_whole(tensors, objects, lambda values: _in_order(values, "model", local.names))


def plain_checkpoint(rest: Mapping[str, Any], order: Sequence[str], values: Mapping[Keys, Any]) -> dict[str, Any]:
    """Nest values by their keys, as a checkpoint of one process does: numbers stand for an optimizer's parameters."""
    checkpoint = {**rest, "state_dict": _in_order(values, "model", order)}
    others = {str(keys[0]) for keys in values if keys[0] != "model" and len(keys) == 2 and keys[1] in order}
    checkpoint |= {top: _in_order(values, top, order) for top in sorted(others)}
    optimizers = [keys[0] for keys in values if keys[1:] == ("param_groups",)]
    if optimizers:
        checkpoint["optimizer_states"] = [_plain_optimizer(str(top), values) for top in sorted(optimizers, key=_number)]
    return checkpoint


def _in_order(values: Mapping[Keys, Any], top: str, order: Sequence[str]) -> dict[str, Any]:
    """The values below a first key, in the order of the plain module; those that it has not come last."""
    numbers = {name: i for i, name in enumerate(order)}
    found = {str(keys[1]): value for keys, value in values.items() if keys[0] == top}
    return {name: found[name] for name in sorted(found, key=lambda name: numbers.get(name, len(numbers)))}


def _number(top: str | int) -> int:
    return int(str(top).removeprefix("optimizer_"))


def _plain_optimizer(top: str, values: Mapping[Keys, Any]) -> dict[str, Any]:
    groups = values[top, "param_groups"]
    numbers = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for keys, value in values.items():
        if keys[0] == top and keys[1] == "state" and len(keys) == 4:
            state.setdefault(numbers[str(keys[2])], {})[str(keys[3])] = value
    plain_groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {"state": dict(sorted(state.items())), "param_groups": plain_groups}
