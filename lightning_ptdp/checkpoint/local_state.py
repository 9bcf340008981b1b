"""The state that a rank holds, under the names of the plain module and its optimizer, and where each tensor lies.

    ("model", name)                             a parameter or buffer
    ("optimizer_0", "state", name, key)         an optimizer's tensor for a parameter
    ("optimizer_0", "param_groups")             its options, with the whole model's names

A tensor of an optimizer that has the shape of its parameter lies where the parameter lies; others are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_ptdp.checkpoint.folder import Folder, Keys
from lightning_ptdp.checkpoint.rectangles import FlatLocation, Located, Location
from lightning_ptdp.comm.collectives import gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.engine.parameters import Parameters

GroupNames = Sequence[Sequence[str]]
"""Names of the whole model's parameters, a list for each group of an optimizer."""


class LocalState:
    """Names and locations of what this rank holds, in one layout."""

    def __init__(self, groups: Groups, parameters: Parameters) -> None:
        """Work out locations from the table of parameters as it is now."""
        self._groups, self.names, self._shards = groups, parameters.state_names, parameters.placement.shards
        self.main_weights = frozenset(parameters.main_weights)
        """Names under which a state of the module holds what optimizers step, in place of its own weights."""
        self.trained: dict[str, Location | FlatLocation] = {}
        """Where what this rank's optimizers step lies, or would lie, by name."""
        for row in parameters:
            for name in row.names:
                location = self.location(name, row.parameter.shape)
                self.trained[name] = (
                    location if row.piece is None else location.piece(row.piece.start, row.piece.length)
                )

    def location(self, name: str, shape: Sequence[int]) -> Location:
        """Where the local tensor of this name, and of this local shape, lies in the whole."""
        shard = self._shards.get(name)
        if shard is None or len(shape) <= shard.dim:
            return Location.whole(tuple(shape))
        return Location.sharded(tuple(shape), shard, self._groups.at.tensor, self._groups.tensor.size())

    # -- the module ------------------------------------------------------------------------------------------------

    def module_entries(
        self, state: Mapping[str, Any], top: str = "model"
    ) -> tuple[dict[Keys, Located], dict[Keys, Any]]:
        """Tensors and other values of a module's state that this rank holds, by their place in a checkpoint.

        top: their first key there.
        """
        tensors, objects = _split({(top, name): value for name, value in state.items()})
        return {keys: self._in_module(str(keys[1]), tensor).of(tensor) for keys, tensor in tensors.items()}, objects

    def read_module(self, folder: Folder, state: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of a module's state from a checkpoint, in place.

        Returns them, with values that are no tensors, and, whole, what the plain module has no name for.
        """
        stored = {str(name): found for (name,), found in folder.tensors("model").items()}
        tensors, _ = _split({name: value for name, value in state.items() if name in stored})
        strange = {n: torch.empty(s.size, dtype=s.dtype) for n, s in stored.items() if n not in self.names}
        located: dict[Keys, Located] = {}
        located |= {("model", name): self._in_module(name, tensor).of(tensor) for name, tensor in tensors.items()}
        located |= {("model", name): Location.whole(tuple(tensor.shape)).of(tensor) for name, tensor in strange.items()}
        objects: list[Keys] = [("model", *name) for name in folder.objects("model")]
        found = {str(keys[1]): value for keys, value in folder.read(located, objects).items()}
        return {**tensors, **strange, **found}

    def read_other(self, folder: Folder, top: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Read this rank's part of another state of the module in a checkpoint, under the first key `top`."""
        stored = {str(name): found for (name,), found in folder.tensors(top).items() if name in state}
        locations = {name: self._in_module(name, state[name]) for name in stored}
        tensors = {name: torch.empty(locations[name].shape, dtype=found.dtype) for name, found in stored.items()}
        located: dict[Keys, Located] = {(top, name): locations[name].of(tensor) for name, tensor in tensors.items()}
        found = folder.read(located, [(top, *keys) for keys in folder.objects(top)])
        return {**tensors, **{str(keys[1]): value for keys, value in found.items()}}

    def take_module(self, given: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Take this rank's part of a state that is given whole, or as `read_module` returned it."""
        return {
            name: _fitted(given[name], self._in_module(name, held)) if isinstance(held, Tensor) else given[name]
            for name, held in state.items()
            if name in given
        }

    def faults(self, given: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Names that this rank misses in a given state, and names that no rank has a place for."""
        return sorted(set(state) - set(given)), sorted(set(given) - set(self.names))

    def _in_module(self, name: str, tensor: Tensor) -> Location | FlatLocation:
        is_main = name in self.main_weights and tuple(tensor.shape) == self.trained[name].shape
        return self.trained[name] if is_main else self.location(name, tensor.shape)

    # -- an optimizer ----------------------------------------------------------------------------------------------

    def optimizer_state(
        self, optimizer: Optimizer, names: GroupNames, name_of: Mapping[nn.Parameter, str]
    ) -> dict[str, Any]:
        """This rank's part of an optimizer's state, with names in place of parameters.

        Args:
            optimizer: holds this rank's part of the parameters.
            names: for each group, the whole model's parameters in it.
            name_of: names the parameters that the optimizer holds here.

        Returns:
            "state": by name. "param_groups": with the names of the whole model.
        """
        members = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
        return {
            "state": {name_of[p]: dict(optimizer.state[p]) for p in members},
            "param_groups": [
                {**{key: value for key, value in group.items() if key != "params"}, "params": list(known)}
                for group, known in zip(optimizer.param_groups, names, strict=True)
            ],
        }

    def optimizer_entries(self, number: int, state: Mapping[str, Any]) -> tuple[dict[Keys, Located], dict[Keys, Any]]:
        """Tensors and other values of optimizer `number` that this rank holds, by their place in a checkpoint."""
        top = f"optimizer_{number}"
        values: dict[Keys, Any] = {
            (top, "state", name, key): value
            for name, state_of in state["state"].items()
            for key, value in state_of.items()
        }
        tensors, objects = _split(values)
        located: dict[Keys, Located] = {}
        for keys, tensor in tensors.items():
            found = self._located_state(str(keys[2]), tensor)
            if found is not None:
                located[keys] = found
        return located, {**objects, (top, "param_groups"): state["param_groups"]}

    def _located_state(self, name: str, tensor: Tensor) -> Located | None:
        """Where an optimizer's tensor lies; None for one that the replica with the first slice saves for all."""
        trained = self.trained[name]
        if tuple(tensor.shape) == trained.shape:
            return trained.of(tensor)
        whole = Location.whole(tuple(tensor.shape)).of(tensor)
        if isinstance(trained, Location):
            return whole
        return (
            replace(whole, on_tensor_peers=trained.location.on_tensor_peers, on_replicas=False)
            if trained.start == 0
            else None
        )

    def read_optimizer(self, folder: Folder, number: int) -> dict[str, Any]:
        """Read this rank's part of the state of optimizer `number` in a checkpoint."""
        top = f"optimizer_{number}"
        state: dict[str, dict[str, Any]] = {}
        located: dict[Keys, Located] = {}
        for path, stored in folder.tensors(top, "state").items():
            name, key = map(str, path)
            location = self.trained.get(name)
            if location is None:
                continue
            location = location if location.size == stored.size else Location.whole(stored.size)
            tensor = torch.empty(location.shape, dtype=stored.dtype)
            state.setdefault(name, {})[key] = tensor
            located[top, "state", name, key] = location.of(tensor)
        objects: list[Keys] = [(top, *keys) for keys in folder.objects(top) if len(keys) < 2 or keys[1] in self.trained]
        found = folder.read(located, objects)
        for keys, value in found.items():
            if len(keys) == 4:
                state.setdefault(str(keys[2]), {})[str(keys[3])] = value
        return {"state": state, "param_groups": found[top, "param_groups"]}

    def take_optimizer(
        self, given: Mapping[str, Any], optimizer: Optimizer, names: GroupNames, name_of: Mapping[nn.Parameter, str]
    ) -> dict[str, Any]:
        """Turn a state, whole or as `read_optimizer` returned it, into one for this rank's `load_state_dict`.

        Raises:
            ValueError: its groups do not have the members of this optimizer's.
        """
        known_as = _numbering(given["param_groups"], names)
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group, options in zip(optimizer.param_groups, given["param_groups"], strict=True):
            groups.append({**options, "params": list(range(number, number + len(group["params"])))})
            for parameter in group["params"]:
                name = name_of[parameter]
                values = given["state"].get(known_as[name])
                if values is not None:
                    state[number] = {key: _fitted(value, self.trained[name]) for key, value in values.items()}
                number += 1
        return {"state": state, "param_groups": groups}


def _fitted(value: Any, location: Location | FlatLocation) -> Any:
    """The local part of a tensor that is given whole; anything else as it is."""
    if not isinstance(value, Tensor) or tuple(value.shape) != location.size or location.size == location.shape:
        return value
    local = value.new_empty(location.shape)
    location.of(local).take(value)
    return local


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
