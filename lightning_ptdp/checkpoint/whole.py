"""The plain module's state on one rank, from what all ranks own, and each rank's part of it.

Keys, shapes and parameter order are those of the module in one process; nothing says how it was split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_ptdp.comm.collectives import gather_objects_to
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.tensor_parallel.shard import Shard


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

    def gather_optimizer(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The states of all parameters by name on global rank 0; empty elsewhere.

        state: of this rank's parameters, by name.
        """
        flat = {f"{name}\n{key}": value for name, values in state.items() for key, value in values.items()}
        whole: dict[str, dict[str, Any]] = {}
        for key, value in self._gather(flat).items():
            name, _, entry = key.partition("\n")
            whole.setdefault(name, {})[entry] = value
        return whole

    def cut_optimizer(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a parameter's optimizer state."""
        return {key: self._cut(name, value) for key, value in values.items()}

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


def owned_groups(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The parameter groups of the whole model: an optimizer's options, with parameters numbered in the plain order."""
    numbered, start = [], 0
    for group, members in zip(groups, names, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        numbered.append({**options, "params": list(range(start, start + len(members)))})
        start += len(members)
    return numbered
