"""Counts what a rank sends, below everything that sends: for tests and benchmarks, at no cost to a run without it.

    with Traffic() as traffic:
        trainer.fit(module)
    traffic.elements(group=groups.tensor)

A collective over n ranks counts as the bandwidth-optimal ring algorithm of it, whatever the backend runs:

    all-reduce of N elements                         2 N (n-1)/n a rank
    all-gather to N, reduce-scatter of N             N (n-1)/n
    broadcast of N, a message of N                   N from its source
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Kind:
    """What is counted apart: "all_reduce", "all_gather", "reduce_scatter", "broadcast" or "send"; group and dtype."""

    operation: str
    group: str
    dtype: torch.dtype


class Traffic(TorchDispatchMode):
    """Counts while it is entered; entered again, it goes on counting."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: dict[Kind, Fraction] = defaultdict(Fraction)
        """Elements, exact."""

    def elements(
        self, *, operation: str | None = None, group: ProcessGroup | None = None, dtype: torch.dtype | None = None
    ) -> Fraction:
        """What this rank sent, of one operation, group and dtype where they are given."""
        name = None if group is None else group.group_name
        return sum(
            (
                count
                for kind, count in self.sent.items()
                if operation in (None, kind.operation) and name in (None, kind.group) and dtype in (None, kind.dtype)
            ),
            Fraction(),
        )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self._count(function.overloadpacket.__name__, args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name in _SEND_NOTHING:
            return
        if name not in _KNOWN:
            raise NotImplementedError(
                f"what torch's c10d::{name} sends isn't counted; give it a line in benchmarks/traffic.py"
            )
        operation, tensor_at, group_at, cost = _KNOWN[name]
        group = ProcessGroup.unbox(args[group_at])
        is_source = operation != "broadcast" or args[2] == group.rank()
        for tensor in _tensors(args[tensor_at]) if is_source else ():
            self.sent[Kind(operation, group.group_name, tensor.dtype)] += cost(tensor.numel(), group.size())


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in _tensors(item)]


def _whole(numel: int, _: int) -> Fraction:
    return Fraction(numel)


def _once_around(numel: int, size: int) -> Fraction:
    return Fraction(numel * (size - 1), size)


def _twice_around(numel: int, size: int) -> Fraction:
    return 2 * _once_around(numel, size)


_SEND_NOTHING = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")

# Of torch's operations: which it is, where its largest tensor and its group are among the arguments, what a rank sends.
_KNOWN: dict[str, tuple[str, int, int, Callable[[int, int], Fraction]]] = {
    "allreduce_": ("all_reduce", 0, 1, _twice_around),
    "broadcast_": ("broadcast", 0, 1, _whole),
    "_allgather_base_": ("all_gather", 0, 2, _once_around),
    "allgather_": ("all_gather", 0, 2, _once_around),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2, _once_around),
    "send": ("send", 0, 1, _whole),
}
