"""A checkpoint's contents: from the nested dict of the Trainer to named values of this rank, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_ptdp.checkpoint.folder import Keys
from lightning_ptdp.checkpoint.local_state import LocalState
from lightning_ptdp.checkpoint.rectangles import Placed
from lightning_ptdp.checkpoint.share import share_out
from lightning_ptdp.comm.collectives import gather_objects
from lightning_ptdp.comm.groups import Groups


@dataclass(frozen=True)
class Contents:
    """What this rank contributes to a checkpoint.

    tensors, objects: that it writes, and no other rank. rest: everything else, of which rank 0's counts.
    order: of names in the plain model.
    """

    tensors: Mapping[Keys, Placed]
    objects: Mapping[Keys, Any]
    rest: Mapping[str, Any]
    order: Sequence[str]

    def copied(self) -> Contents:
        """The same on the host, in memory of its own."""
        tensors = {keys: placed.copied() for keys, placed in self.tensors.items()}
        return replace(
            self, tensors=tensors, objects=copy.deepcopy(dict(self.objects)), rest=copy.deepcopy(dict(self.rest))
        )


def contents_of(checkpoint: Mapping[str, Any], local: LocalState, groups: Groups) -> Contents:
    """Take a checkpoint apart; every rank of the world calls it.

    checkpoint: as the Trainer dumped it, with this rank's state in it.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    tensors, objects = local.module_entries(checkpoint["state_dict"])
    for number, state in enumerate(checkpoint.get("optimizer_states", ())):
        more, others = local.optimizer_entries(number, state)
        tensors |= more
        objects |= others
        if not any(gather_objects(bool(state["state"]), groups.world)):
            objects[f"optimizer_{number}", "state"] = {}
    return Contents(*share_out(tensors, objects, groups), rest, local.names)


def plain_checkpoint(rest: Mapping[str, Any], order: Sequence[str], values: Mapping[Keys, Any]) -> dict[str, Any]:
    """The nested dict of one process, of all values by their keys: an optimizer's parameters have numbers there."""
    places = {name: i for i, name in enumerate(order)}
    model = {str(keys[1]): value for keys, value in values.items() if keys[0] == "model"}
    checkpoint = {
        **rest,
        "state_dict": {name: model[name] for name in sorted(model, key=lambda n: places.get(n, len(places)))},
    }
    optimizers = [keys[0] for keys in values if keys[1:] == ("param_groups",)]
    if optimizers:
        checkpoint["optimizer_states"] = [_plain_optimizer(str(top), values) for top in sorted(optimizers, key=_number)]
    return checkpoint


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
