"""The order of an epoch's samples, as few plain values, and its rest dealt to any number of replicas.

order       3 1 4 0 | 2 5 6        4 samples are seen, and two replicas go on
replica 0             2   6
replica 1               5   3      the first of the order is repeated; with drop_last 6 is left out instead
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler


def order_of(sampler: object, drawn_from: torch.Tensor | None, own: torch.Tensor | None) -> dict[str, Any] | None:
    """Describe a sampler's order of the epoch, so that `samples_in` finds it again.

    Args:
        sampler: None is returned for one of a class that is not known here.
        drawn_from: the state of torch's default generator when the order was drawn.
        own: the state of the sampler's own generator then; None if it has none.
    """
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is DistributedSampler:
        return {"kind": "distributed", "shuffle": sampler.shuffle, "seed": sampler.seed, "epoch": sampler.epoch}
    if type(sampler) is RandomSampler and drawn_from is not None:
        many = {"replacement": sampler.replacement, "num_samples": sampler.num_samples}
        return {"kind": "random", **many, "drawn_from": drawn_from, "own": own}
    return None


def samples_in(order: Mapping[str, Any], num_samples: int) -> list[int]:
    """List the samples of a dataset by number, in an order that `order_of` described, as one process reads them."""
    samples: Any = range(num_samples)
    if order["kind"] == "distributed":
        sampler: DistributedSampler[int] = DistributedSampler(
            samples, 1, 0, shuffle=order["shuffle"], seed=order["seed"]
        )
        sampler.set_epoch(order["epoch"])
        return list(sampler)
    if order["kind"] == "random":
        own = None if order["own"] is None else torch.Generator()
        if own is not None:
            own.set_state(order["own"])
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(order["drawn_from"])
            return list(RandomSampler(samples, order["replacement"], order["num_samples"], own))
    return list(samples)


def rest_of(order: Sequence[int], seen: int, *, replica: int, num_replicas: int, drop_last: bool) -> list[int]:
    """Give a replica its part of the samples after the first `seen`, dealt as a `DistributedSampler` deals all.

    Replicas get equally many: the last few are left out if drop_last, else the first of the order are repeated.
    """
    rest = list(order[seen:])
    if drop_last:
        rest = rest[: len(rest) - len(rest) % num_replicas]
    else:
        rest += islice(cycle(order), -len(rest) % num_replicas)
    return rest[replica::num_replicas]
