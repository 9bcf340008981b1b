"""A training loader that goes on in the middle of an epoch, under any number of replicas."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from rich.progress import track
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ptdp.generators import random_state, set_random_state
from lightning_ptdp.host.torch import kept_iterator, may_keep_iterator, set_kept_iterator
from lightning_ptdp.loaders.order import order_of, rest_of, samples_in

_HOST = torch.device("cpu")
Position = dict[str, Any]
"""Where a loader stands, as plain values."""


class _Draw:
    """Stands between a loader and its sampler: gives what the sampler draws, or for one pass the rest of an epoch.

    Attributes:
        drawn_from: where the random generators stood when the order of the pass was drawn.
        rest: makes the draws of the coming pass, and is used up by it. None lets the sampler draw.
    """

    def __init__(self, source: Any, generators: list[torch.Generator]) -> None:
        self._source, self._generators = source, generators
        self.drawn_from: dict[str, Any] | None = None
        self.rest: Callable[[], Iterator[Any]] | None = None

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        rest, self.rest = self.rest, None
        if rest is not None:
            yield from rest()
        else:
            self.drawn_from = stands(self._generators)
            yield from self._source

    def without(self, count: int, drawn_from: dict[str, Any]) -> Iterator[Any]:
        """Draw the order of a saved state again, and skip its first `count` items; the default generators stay."""
        self.drawn_from, mine = drawn_from, random_state(_HOST)
        go_to(drawn_from, self._generators)
        drawn = iter(self._source)
        deque(islice(drawn, count), maxlen=0)
        set_random_state(mine, _HOST)
        yield from drawn


class ResumableLoader:
    """A loader, with a position that can be saved and gone back to.

    Where samples have numbers, those before the position are drawn and not loaded. Other loaders, such as one of an
    iterable dataset, are read again up to the position. Attributes that are not defined here are the user's loader's.
    """

    def __init__(
        self,
        loader: Any,
        *,
        num_replicas: int,
        restore: Callable[[], None] | None,
        shows: bool,
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            loader: gives this replica's batches.
            num_replicas: d.
            restore: puts the run's random generators where the checkpoint found them. Given if a checkpoint is loaded:
                the first pass then begins only when its first batch is asked for.
            shows: whether a bar shows the progress of reading again.
            warn: takes a sentence for the user.
        """
        self._given, self._num_replicas, self._shows, self._warn = loader, num_replicas, shows, warn
        self._restore, self._waits = restore, restore is not None
        self._has_numbers = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        self._generators = _generators_of(loader)
        self._loader: Any = loader
        self._draw: _Draw | None = None
        if self._has_numbers:
            self._loader, self._draw = _drawing(loader, self._generators)
        self._began_at: dict[str, Any] | None = None
        self._saved: Position | None = None
        self._left: list[Any] | None = None  # of a saved epoch, for this replica of another layout; see `_rest_of`
        # Batches of the pass: given or skipped, and skipped. Samples of the epoch's order that are behind the skipped.
        self._count, self._skipped, self._seen_before = 0, 0, 0
        self._order: dict[str, Any] | None = None  # of the epoch as another layout drew it, if its rest is dealt out
        self._length: int | None = None  # batches of this pass, where they are not as many as usual

    # -- what Lightning and users ask a loader for -----------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if "_given" not in vars(self):  # copy.copy asks before there are any
            raise AttributeError(name)
        return getattr(self._given, name)

    @property
    def _iterator(self) -> Any:  # Lightning reads and resets this name, to end the workers
        return kept_iterator(self._loader)

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        if may_keep_iterator(self._loader):
            set_kept_iterator(self._loader, value)

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        coming = self._coming_length
        return self.usual_length if coming is None else max(coming, self.usual_length)  # Lightning limits later passes

    def __iter__(self) -> Iterator[Any]:
        self._length = self._coming_length
        return self._later() if self._waits else self._pass()

    def _later(self) -> Iterator[Any]:
        """The first pass after a checkpoint was loaded: it begins when its first batch is asked for."""
        self._waits = False
        if self._restore is not None and not (self._saved and self._saved["batches"]):
            self._restore()
        yield from self._pass()

    def _pass(self) -> Iterator[Any]:
        """Begin a pass: from the saved position if there is one, else from the beginning."""
        saved, self._saved = self._saved, None
        self._count = self._skipped = 0 if saved is None else saved["batches"]
        self._seen_before = 0 if saved is None else saved["seen"]
        self._order = None
        if saved is not None:
            go_to({"generators": saved["generators"]}, self._generators)
        if saved is None or not self._count:
            self._began_at = None if self._draw is not None else stands(self._generators)
            batches = iter(self._loader)
        elif self._draw is not None:
            mine, self._draw.rest = random_state(_HOST), self._rest(saved, self._draw)
            batches = iter(self._loader)  # which draws a seed for workers
            set_random_state(mine, _HOST)
        else:
            batches = self._replayed(saved)
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._count += 1
            yield batch

    # -- the position ----------------------------------------------------------------------------------------------

    @property
    def usual_length(self) -> int:
        """Batches of a pass from the beginning."""
        return len(self._given)

    @property
    def is_of_other_length(self) -> bool:
        """Whether this pass, or the coming one, has another number of batches."""
        length = self._length or self._coming_length
        return length is not None and length != self.usual_length

    @property
    def _coming_length(self) -> int | None:
        """Batches of the coming pass, skipped ones included, if it deals out the rest of an epoch; else None."""
        if self._saved is None or self._left is None:
            return None
        return int(self._saved["batches"]) + len(self._left)

    def position(self, trained: int, *, is_over: bool) -> Position:
        """Tell where the loader stands.

        Args:
            trained: batches of the epoch that this replica trained on.
            is_over: whether the epoch is over, so that the next one begins at its beginning.

        Returns:
            batches: trained on in this epoch, by each replica. seen: samples of the epoch's order, by all together.
            samples: in the dataset. replicas: d. deal: see `_deal`. order: see `order_of`. epoch: the sampler's.
            drawn_from: where generators stood when the order was drawn. generators: where the loader's own stand.
        """
        if self._saved is not None:
            return self._saved
        count = 0 if is_over else min(self._count, trained)  # a loader without a length is read one batch ahead
        drawn_from = self._began_at if self._draw is None else self._draw.drawn_from
        order = self._order
        deal: list[int | None] | None = self._deal
        if order is not None:
            deal = None  # another layout's order: only its rest can be dealt out again
        elif self._draw is not None and drawn_from is not None:
            sampler = _sampler_of(self._given)
            own = getattr(sampler, "generator", None)
            states = [s for g, s in zip(self._generators, drawn_from["generators"], strict=True) if g is own]
            order = order_of(sampler, drawn_from["shared"]["torch"][0], states[0] if states else None)
        return {
            "batches": count,
            "seen": self._seen_before + (count - self._skipped) * _product(self._deal) if count else 0,
            "samples": self._num_samples,
            "replicas": self._num_replicas,
            "deal": deal,
            "order": order if count else None,
            "epoch": getattr(_sampler_of(self._given), "epoch", None),
            "drawn_from": drawn_from if count else None,
            "generators": stands(self._generators)["generators"],
        }

    def resume(self, saved: Position) -> None:
        """Begin the next pass at a position, which `position` told under this layout or another."""
        self._saved, sampler = saved, _sampler_of(self._given)
        if saved["batches"] and hasattr(sampler, "set_epoch") and saved["epoch"] is not None:
            sampler.set_epoch(saved["epoch"])  # Lightning does it after the first pass has begun
        self._left = self._rest_of(saved) if self._deals_anew(saved) else None
        mine = [self._deal, self._num_replicas, self._num_samples]
        is_dealt_alike = [saved["deal"], saved["replicas"], saved["samples"]] == mine
        if saved["batches"] and not is_dealt_alike and self._left is None:
            self._warn(
                f"the training loader was saved after {saved['batches']} batches, of {saved['samples']} samples for "
                f"{saved['replicas']} replicas, and has {self._num_samples} for {self._num_replicas} now; what is left "
                "of its epoch cannot be dealt out anew, so as many batches are skipped, and samples may be missed or "
                "repeated. Use the same data and shuffle=True, a DistributedSampler, or a loader with state_dict"
            )

    @property
    def _num_samples(self) -> int | None:
        return sized_len(getattr(self._given, "dataset", None))

    @property
    def _deal(self) -> list[int | None]:
        """How many replicas share the order, and how many samples each takes a batch; None where that is not known."""
        sampler = _sampler_of(self._given)
        num_replicas = sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1
        drawn = getattr(self._given, "batch_sampler", None)
        if drawn is None:
            return [num_replicas, 1 if self._has_numbers else None]
        return [num_replicas, drawn.batch_size if type(drawn) is BatchSampler else None]

    def _deals_anew(self, saved: Position) -> bool:
        """Whether what is left of a saved epoch has to be dealt out: to other replicas, or in other batches."""
        known = saved["order"] is not None and order_of(_sampler_of(self._given), torch.empty(0), None) is not None
        sizes_known = None not in self._deal and saved["samples"] == self._num_samples
        return bool(saved["batches"]) and known and sizes_known and saved["deal"] != self._deal

    def _rest_of(self, saved: Position) -> list[Any]:
        """What is left of the epoch to this replica: batches of sample numbers, or numbers where nothing is batched."""
        sampler, drawn = _sampler_of(self._given), self._given.batch_sampler
        order = samples_in(saved["order"], saved["samples"])
        splits = isinstance(sampler, DistributedSampler)
        mine = rest_of(
            order,
            saved["seen"],
            replica=sampler.rank if splits else 0,
            num_replicas=sampler.num_replicas if splits else 1,
            drop_last=splits and sampler.drop_last,
        )
        return mine if drawn is None else list(BatchSampler(mine, drawn.batch_size, drawn.drop_last))

    def _rest(self, saved: Position, draw: _Draw) -> Callable[[], Iterator[Any]]:
        """Make the draws after the position; nothing is drawn before they are asked for."""
        left, self._left = self._left, None
        if left is None:
            return lambda: draw.without(saved["batches"], saved["drawn_from"])
        self._order, draw.drawn_from = saved["order"], saved["drawn_from"]

        def rest() -> Iterator[Any]:
            go_to({"generators": saved["generators"]}, self._generators)
            return iter(left)

        return rest

    def _replayed(self, saved: Position) -> Iterator[Any]:
        """The batches after the position; those before it are read again, from where the generators stood."""
        mine = random_state(_HOST)
        go_to(saved["drawn_from"], self._generators)
        self._began_at = saved["drawn_from"]
        batches: Iterator[Any] = iter(self._loader)
        steps = track(
            range(self._count), description="Reading the loader up to the checkpoint", disable=not self._shows
        )
        deque(zip(steps, batches, strict=False), maxlen=0)
        if sized_len(self._given) is not None:  # else a batch is read ahead, before the run's own state is restored
            set_random_state(mine, _HOST)
        return batches


def stands(generators: list[torch.Generator]) -> dict[str, Any]:
    """Tell where random generators stand: the default ones of the host, and those that a loader was given."""
    return {"shared": random_state(_HOST), "generators": [generator.get_state() for generator in generators]}


def go_to(state: Mapping[str, Any], generators: list[torch.Generator]) -> None:
    """Put generators where `stands` found them; a loader's own stay if they are not as many as they were."""
    if "shared" in state:
        set_random_state(state["shared"], _HOST)
    if len(state["generators"]) == len(generators):
        for generator, position in zip(generators, state["generators"], strict=True):
            generator.set_state(position)


def _drawing(loader: DataLoader[Any], generators: list[torch.Generator]) -> tuple[DataLoader[Any], _Draw]:
    """Copy a loader so that its draws can be steered; DataLoader lets nobody set its samplers afterwards."""
    twin, name = copy.copy(loader), "sampler" if loader.batch_sampler is None else "batch_sampler"
    draw = _Draw(getattr(loader, name), generators)
    vars(twin)[name] = draw
    return twin, draw


def _sampler_of(loader: object) -> Any:
    drawn = getattr(loader, "batch_sampler", None)
    return getattr(loader if drawn is None else drawn, "sampler", None)


def _generators_of(loader: object) -> list[torch.Generator]:
    """The generators that a loader and its samplers were given, each once."""
    holders = [loader, getattr(loader, "batch_sampler", None), _sampler_of(loader)]
    found = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    return list(dict.fromkeys(value for value in found if isinstance(value, torch.Generator)))


def _product(deal: list[int | None]) -> int:
    """Samples that all replicas together take a batch; what is not known counts as 1."""
    num_replicas, size = deal
    return (num_replicas or 1) * (size or 1)
