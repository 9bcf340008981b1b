"""Before anything starts, all ranks say what they are about to run, and all raise the same faults or none does.

A rank states what it has in sections of items (versions, arguments, the module's parameters, ...) and what it found
wrong. One all-gather of a hash a section tells where ranks differ. Only for those sections one rank of each kind sends
the items, so that every rank can name the difference with both values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed import ProcessGroup

from lightning_ptdp.comm.collectives import gather_objects

Items = Mapping[str, str]
"""What a rank states in one section: values by name, both in words."""

_FAULTS = "faults"
_SHOWN = 4  # at most so many differences of a section are spelled out


@dataclass(frozen=True)
class Section:
    """Things of one kind that all ranks must have alike.

    Attributes:
        name: the same on every rank.
        rule: what must hold, a main clause.
        items: what this rank has.
        remedy: what to do if ranks differ.
        explained_by: names of other sections. If one of these differs, this one may differ as a consequence, and is not
            told.
    """

    name: str
    rule: str
    items: Items
    remedy: str
    explained_by: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True)
class Findings:
    """What ranks found together, the same on each.

    Attributes:
        faults: a sentence each.
        are_alike: whether all ranks stated the same items and faults.
    """

    faults: list[str]
    are_alike: bool

    def refuse(self) -> None:
        """Raise if there are faults.

        Raises:
            ValueError: with all of them, one a line.
        """
        if self.faults:
            raise ValueError("PTDPStrategy cannot run this:\n" + "\n".join(f"- {fault}" for fault in self.faults))


def compare(sections: Sequence[Section], faults: Iterable[str], group: ProcessGroup) -> Findings:
    """Find everything that is wrong on any rank of a group; every rank must call this, and gets the same.

    Args:
        sections: what this rank states; every rank gives the same sections.
        faults: what this rank found wrong by itself, a sentence each.
        group: the ranks that are compared.

    Returns:
        The faults of all ranks, and a sentence for each section in which ranks differ.
    """
    mine = list(dict.fromkeys(faults))
    stated: dict[str, Items] = {section.name: section.items for section in sections}
    found = gather_differing(stated | {_FAULTS: dict.fromkeys(mine, "")}, group)
    told = found.pop(_FAULTS, None)
    everyones = mine if told is None else _attributed(told)
    differences = [
        _sentence(section, found[section.name])
        for section in sections
        if section.name in found and section.explained_by.isdisjoint(found)
    ]
    return Findings(everyones + differences, are_alike=told is None and not found)


def gather_differing(stated: Mapping[str, Items], group: ProcessGroup) -> dict[str, list[Items]]:
    """Find the sections in which ranks of a group differ; every rank must call this, and gets the same.

    Args:
        stated: this rank's items, by the names of sections.
        group: the ranks that are compared.

    Returns:
        For each section that differs the items of every rank, in the order of ranks.
    """
    hashes = gather_objects({name: _digest(items) for name, items in stated.items()}, group)
    names = dict.fromkeys(name for each in hashes for name in each)
    spoken_by = {
        name: [hashes.index(next(h for h in hashes if h.get(name) == each.get(name))) for each in hashes]
        for name in names
        if any(each.get(name) != hashes[0].get(name) for each in hashes)
    }
    if not spoken_by:
        return {}
    rank = group.rank()
    sent = gather_objects(
        {name: dict(stated.get(name, {})) for name, speakers in spoken_by.items() if rank in speakers}, group
    )
    return {name: [sent[speaker][name] for speaker in speakers] for name, speakers in spoken_by.items()}


def differing_items(everyones: Sequence[Items]) -> dict[str, list[str | None]]:
    """Find the items that differ between ranks.

    Args:
        everyones: the items of each rank.

    Returns:
        For each item that differs its value on every rank, None if a rank lacks it.
    """
    names = dict.fromkeys(name for items in everyones for name in items)
    values = {name: [items.get(name) for items in everyones] for name in names}
    return {name: held for name, held in values.items() if len(set(held)) > 1}


def in_words(ranks: Sequence[int]) -> str:
    """Write ascending ranks for a message: ``rank 3``, ``ranks 0, 1 and 4-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _digest(items: Items) -> str:
    return hashlib.blake2b(repr(list(items.items())).encode(), digest_size=16).hexdigest()


def _attributed(everyones: Sequence[Items]) -> list[str]:
    """Join the faults of all ranks; one that not all found names the ranks that did."""
    differing = differing_items(everyones)
    return [
        f"on {in_words([rank for rank, value in enumerate(differing[fault]) if value is not None])}: {fault}"
        if fault in differing
        else fault
        for fault in dict.fromkeys(fault for items in everyones for fault in items)
    ]


def _sentence(section: Section, everyones: Sequence[Items]) -> str:
    """Say in which items of a section ranks differ, which rule that breaks, and what to do."""
    differing = differing_items(everyones)
    parts = [_difference(item, values) for item, values in list(differing.items())[:_SHOWN]]
    if len(differing) > _SHOWN:
        parts.append(f"and {len(differing) - _SHOWN} more differ")
    if not parts:
        parts = ["the order differs between ranks"]
    return f"{section.rule}: {', '.join(parts)}; {section.remedy}"


def _difference(item: str, values: Sequence[str | None]) -> str:
    """Say which ranks have which values of an item: ``rank 3 has torch 2.12.0 where ranks 0-2 have 2.13.0``."""
    holders: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    reference, *others = holders.items()
    told = [f"{_have(ranks)} {_of(item, value)}" for value, ranks in others]
    return f"{' and '.join(told)} where {_have(reference[1])} {'none' if reference[0] is None else reference[0]}"


def _have(ranks: Sequence[int]) -> str:
    return f"{in_words(ranks)} {'have' if len(ranks) > 1 else 'has'}"


def _of(item: str, value: str | None) -> str:
    return f"no {item}" if value is None else f"{item} {value}"
