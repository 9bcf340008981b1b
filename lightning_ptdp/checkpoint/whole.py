"""The plain module's state on one rank, from what all ranks own, and each rank's part of it.

Keys, shapes and parameter order are those of the module in one process; nothing says how it was split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.comm.collectives import gather_objects_to
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.tensor_parallel.shard import Shard

GroupNames = Sequence[Sequence[str]]
NameOf = Mapping[nn.Parameter, str]


class WholeState:
    """Joins and cuts state for one layout."""

    def __init__(self, groups: Groups, names: Sequence[str], shards: Mapping[str, Shard]) -> None:
        """names: of the plain module's state, in order. shards: of the parameters that tensor peers split."""
        self._groups, self._names, self._shards = groups, tuple(names), shards

    def gather_module(self, local: Mapping[str, Any]) -> dict[str, Any]:
        """The plain module's state on global rank 0; empty elsewhere. Every rank of the world calls it."""
        found = self._gather(dict(local))
        order = {name: i for i, name in enumerate(self._names)}
        return {name: found[name] for name in sorted(found, key=lambda name: order.get(name, len(order)))}

    def cut_module(self, whole: Mapping[str, Any], local_names: Sequence[str]) -> dict[str, Any]:
        """This rank's part of the plain module's state."""
        return {name: self._cut(name, whole[name]) for name in local_names if name in whole}

    def check_names(self, whole: Mapping[str, Any]) -> None:
        """Raise unless the state has the plain module's names.

        Raises:
            RuntimeError: names are missing or unknown.
        """
        missing, unknown = set(self._names) - set(whole), set(whole) - set(self._names)
        if missing or unknown:
            raise RuntimeError(
                f"the checkpoint's weights do not fit the module: missing {sorted(missing)}, unexpected "
                f"{sorted(unknown)}; load one of the same model, or set strict_loading=False on the module"
            )

    def gather_optimizer(self, optimizer: Optimizer, names: GroupNames, name_of: NameOf) -> dict[str, Any]:
        """The plain optimizer's state on global rank 0; without values elsewhere.

        names: of the whole model's parameters, by group. name_of: this rank's parameters.
        """
        members = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
        flat = {f"{name_of[p]}\n{key}": value for p in members for key, value in optimizer.state[p].items()}
        numbers = _numbers(names)
        state: dict[int, dict[str, Any]] = {}
        for path, value in self._gather(flat).items():
            name, _, key = path.partition("\n")
            state.setdefault(numbers[name], {})[key] = value
        return {"state": state, "param_groups": _plain_groups(optimizer.param_groups, names)}

    def cut_optimizer(
        self, optimizer: Optimizer, names: GroupNames, name_of: NameOf, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """This rank's part of a plain optimizer's state, as its `load_state_dict` takes it."""
        numbers = _numbers(names)
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        place = 0
        for group, options in zip(optimizer.param_groups, given["param_groups"], strict=True):
            groups.append({**options, "params": list(range(place, place + len(group["params"])))})
            for parameter in group["params"]:
                name = name_of[parameter]
                values = given["state"].get(numbers[name])
                if values is not None:
                    state[place] = {key: self._cut(name, value) for key, value in values.items()}
                place += 1
        return {"state": state, "param_groups": groups}

    def _gather(self, local: dict[str, Any]) -> dict[str, Any]:
        """Join what the ranks of replica 0 hold; keys are a parameter's name, and a line break before anything more."""
        if self._groups.at.data != 0:
            return {}
        host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in local.items()}
        parts = gather_objects_to(host, 0, self._groups.replica)
        if parts is None:
            return {}
        t = self._groups.topology.tensor_parallel_size
        by_line = [parts[i : i + t] for i in range(0, len(parts), t)]  # a line of tensor peers for each pipeline rank
        whole: dict[str, Any] = {}
        for line in by_line:
            for key, value in line[0].items():
                if key not in whole:
                    whole[key] = self._join(key.partition("\n")[0], [part[key] for part in line], value)
        return whole

    def _join(self, name: str, values: list[Any], first: Any) -> Any:
        shard = self._shards.get(name)
        if shard is None or not isinstance(first, Tensor) or first.ndim <= shard.dim:
            return first
        return shard.join(values)

    def _cut(self, name: str, value: Any) -> Any:
        shard = self._shards.get(name)
        if shard is None or not isinstance(value, Tensor) or value.ndim <= shard.dim:
            return value
        return shard.cut(value, self._groups.at.tensor, self._groups.topology.tensor_parallel_size)


def _numbers(names: GroupNames) -> dict[str, int]:
    """The plain optimizer's number of each parameter."""
    return {name: i for i, name in enumerate(name for group in names for name in group)}


def _plain_groups(groups: Sequence[Mapping[str, Any]], names: GroupNames) -> list[dict[str, Any]]:
    """An optimizer's options by group, with the whole model's parameters numbered in the plain order."""
    numbers = _numbers(names)
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[n] for n in members]}
        for group, members in zip(groups, names, strict=True)
    ]
