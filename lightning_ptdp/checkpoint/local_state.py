"""The state that a rank holds, under the names of the plain module and its optimizer, and where each tensor lies.

    ("model", name)                             a parameter or buffer
    ("optimizer_0", "state", name, key)         an optimizer's tensor for a parameter
    ("optimizer_0", "param_groups")             its options, with the whole model's names

A tensor of an optimizer that has the shape of its parameter lies where the parameter lies; others are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_ptdp.checkpoint.folder import Folder, Keys
from lightning_ptdp.checkpoint.rectangles import Place, Placed, Size
from lightning_ptdp.comm.collectives import gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.tensor_parallel.shard import Shard

GroupNames = Sequence[Sequence[str]]
"""Names of the whole model's parameters, a list for each group of an optimizer."""


class LocalState:
    """Names and places of what this rank holds, in one layout."""

    def __init__(self, groups: Groups, names: Sequence[str], shards: Mapping[str, Shard]) -> None:
        """names: of the plain module's state, in order. shards: of what tensor peers split, by name."""
        self._groups, self.names, self._shards = groups, tuple(names), shards

    def place(self, name: str, shape: Sequence[int]) -> Place:
        """Where the local tensor of this name lies. shape: of the local tensor."""
        shard = self._shards.get(name)
        if shard is None or len(shape) <= shard.dim:
            return Place.whole(tuple(shape))
        return Place.sharded(tuple(shape), shard, self._groups.at.tensor, self._groups.tensor.size())

    # -- the module ------------------------------------------------------------------------------------------------

    def module_entries(self, state: Mapping[str, Any]) -> tuple[dict[Keys, Placed], dict[Keys, Any]]:
        """Tensors and other values of a module's state that this rank holds, by their place in a checkpoint."""
        tensors, objects = _split({("model", name): value for name, value in state.items()})
        return {keys: self.place(str(keys[1]), t.shape).of(t) for keys, t in tensors.items()}, objects

    def read_module(self, folder: Folder, state: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of a module's state from a checkpoint, in place.

        Returns them, with values that are no tensors, and, whole, what the plain module has no name for.
        """
        stored = {str(name): found for (name,), found in folder.tensors("model").items()}
        tensors, _ = _split({name: value for name, value in state.items() if name in stored})
        strange = {n: torch.empty(s.size, dtype=s.dtype) for n, s in stored.items() if n not in self.names}
        placed: dict[Keys, Placed] = {}
        placed |= {("model", name): self.place(name, tensor.shape).of(tensor) for name, tensor in tensors.items()}
        placed |= {("model", name): Place.whole(tuple(tensor.shape)).of(tensor) for name, tensor in strange.items()}
        objects: list[Keys] = [("model", *name) for name in folder.objects("model")]
        found = {str(keys[1]): value for keys, value in folder.read(placed, objects).items()}
        return {**tensors, **strange, **found}

    def take_module(self, given: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank holds of a state that is given whole, or as `read_module` returned it."""
        return {name: self._fitted(name, given[name], held) for name, held in state.items() if name in given}

    def faults(self, given: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Names that this rank misses in a given state, and names that no rank has a place for."""
        return sorted(set(state) - set(given)), sorted(set(given) - set(self.names))

    def _fitted(self, name: str, value: Any, held: Any) -> Any:
        if not isinstance(value, Tensor) or not isinstance(held, Tensor) or value.shape == held.shape:
            return value
        place = self.place(name, held.shape)
        if tuple(value.shape) != place.size:
            return value
        local = value.new_empty(place.shape)
        place.of(local).take(value)
        return local

    # -- an optimizer ----------------------------------------------------------------------------------------------

    def optimizer_state(
        self, optimizer: Optimizer, names: GroupNames, name_of: Mapping[nn.Parameter, str]
    ) -> dict[str, Any]:
        """The state by name, what this rank holds of it, and the groups with the whole model's names."""
        members = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
        return {
            "state": {name_of[p]: dict(optimizer.state[p]) for p in members},
            "param_groups": [
                {**{key: value for key, value in group.items() if key != "params"}, "params": list(known)}
                for group, known in zip(optimizer.param_groups, names, strict=True)
            ],
        }

    def optimizer_entries(
        self, number: int, state: Mapping[str, Any], shapes: Mapping[str, Size]
    ) -> tuple[dict[Keys, Placed], dict[Keys, Any]]:
        """Tensors and other values of optimizer `number` that this rank holds, by their place in a checkpoint.

        shapes: of the parameters that this rank holds, by name.
        """
        top = f"optimizer_{number}"
        tensors, objects = _split(
            {
                (top, "state", name, key): value
                for name, values in state["state"].items()
                for key, value in values.items()
            }
        )
        placed = {keys: self._place_of_state(str(keys[2]), t, shapes).of(t) for keys, t in tensors.items()}
        return placed, {**objects, (top, "param_groups"): state["param_groups"]}

    def _place_of_state(self, name: str, value: Tensor, shapes: Mapping[str, Size]) -> Place:
        shape = tuple(value.shape)
        return self.place(name, shape) if shape == shapes.get(name) else Place.whole(shape)

    def read_optimizer(self, folder: Folder, number: int, shapes: Mapping[str, Size]) -> dict[str, Any]:
        """The state of optimizer `number` in a checkpoint, what this rank holds of it.

        shapes: of the parameters that this rank holds, by name.
        """
        top = f"optimizer_{number}"
        state: dict[str, dict[str, Any]] = {}
        placed: dict[Keys, Placed] = {}
        for (name, key), stored in _below(folder.tensors(top, "state")):
            if name not in shapes:
                continue
            place = self.place(name, shapes[name])
            place = place if place.size == stored.size else Place.whole(stored.size)
            tensor = torch.empty(place.shape, dtype=stored.dtype)
            state.setdefault(name, {})[key] = tensor
            placed[top, "state", name, key] = place.of(tensor)
        objects = [(top, *keys) for keys in folder.objects(top) if len(keys) < 2 or keys[1] in shapes]
        found = folder.read(placed, objects)
        for keys, value in found.items():
            if keys[1] == "state" and len(keys) == 4:
                state.setdefault(str(keys[2]), {})[str(keys[3])] = value
        return {"state": state, "param_groups": found[top, "param_groups"]}

    def take_optimizer(
        self, given: Mapping[str, Any], optimizer: Optimizer, names: GroupNames, name_of: Mapping[nn.Parameter, str]
    ) -> dict[str, Any]:
        """A given state, whole or as `read_optimizer` returned it, as the optimizer's `load_state_dict` takes it here.

        Raises:
            ValueError: its groups do not have the members of this optimizer's.
        """
        known_as = _numbering(given["param_groups"], names)
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        place = 0
        for group, options in zip(optimizer.param_groups, given["param_groups"], strict=True):
            groups.append({**options, "params": list(range(place, place + len(group["params"])))})
            for parameter in group["params"]:
                name = name_of[parameter]
                values = given["state"].get(known_as[name])
                if values is not None:
                    state[place] = {key: self._fitted(name, value, parameter) for key, value in values.items()}
                place += 1
        return {"state": state, "param_groups": groups}


def _numbering(groups: Sequence[Mapping[str, Any]], names: GroupNames) -> dict[str, int | str]:
    """What a given state calls each parameter: its name, or its number in the plain optimizer."""
    sizes, known = [len(group["params"]) for group in groups], [len(group) for group in names]
    if sizes != known:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, and the run's has {known}; configure the "
            "optimizer as the run that saved did"
        )
    pairs = [
        (name, theirs)
        for group, members in zip(groups, names, strict=True)
        for name, theirs in zip(members, _in_order(group["params"], members), strict=True)
    ]
    return dict(pairs)


def _in_order(theirs: Sequence[int | str], members: Sequence[str]) -> Sequence[int | str]:
    """A checkpoint's members of a group in our order: by name where it has names, else as they come."""
    if not all(isinstance(member, str) for member in theirs):
        return theirs
    names = set(map(str, theirs))
    if names != set(members):
        raise ValueError(
            f"a parameter group of the checkpoint's optimizer has {sorted(names - set(members))}, which the run's has "
            f"not, and lacks {sorted(set(members) - names)}; configure the optimizer as the run that saved did"
        )
    return members


def _below(found: Mapping[Keys, Any]) -> list[tuple[tuple[str, str], Any]]:
    return [((str(keys[0]), str(keys[1])), value) for keys, value in found.items()]


def _split(values: Mapping[Any, Any]) -> tuple[dict[Any, Tensor], dict[Any, Any]]:
    """Tensors, and everything else."""
    tensors = {key: value.detach() for key, value in values.items() if isinstance(value, Tensor)}
    return tensors, {key: value for key, value in values.items() if key not in tensors}


def check_names(faults: tuple[list[str], list[str]], world: ProcessGroup) -> None:
    """Raise on every rank if any rank found names missing or unknown.

    Raises:
        RuntimeError: with all of them.
    """
    found = gather_objects(faults, world)
    missing, unknown = (sorted({name for each in found for name in each[i]}) for i in (0, 1))
    if missing or unknown:
        raise RuntimeError(
            f"the checkpoint's weights do not fit the module: missing {missing}, unexpected {unknown}; load one of the "
            "same model, or set strict_loading=False on the module"
        )
