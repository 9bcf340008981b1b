"""The order of an epoch's samples, as few plain values, and its rest dealt to any number of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler


def order_of(sampler: object, drawn_from: torch.Tensor | None, own: torch.Tensor | None) -> dict[str, Any] | None:
    """What gives a sampler's order of the epoch again; None where it is of a kind that is not known here.

    drawn_from: where torch's default generator stood when the order was drawn. own: where the sampler's own did.
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
    """The numbers of the samples of a dataset in an order, as one process reads them."""
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
    """A replica's share of the samples behind the first `seen`, dealt as a `DistributedSampler` deals all.

    Replicas get equally many: without the last few if drop_last, else the first of the order are repeated.
    """
    rest = list(order[seen:])
    if drop_last:
        rest = rest[: len(rest) - len(rest) % num_replicas]
    else:
        rest += islice(cycle(order), -len(rest) % num_replicas)
    return rest[replica::num_replicas]
