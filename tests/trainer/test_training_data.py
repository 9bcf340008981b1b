"""Which samples a rank trains on: peers of a replica the same, replicas their share (PO-09), whatever loads them."""

import random
import warnings
from collections import defaultdict

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, WeightedRandomSampler

from lightning_ptdp import PTDPStrategy
from tests.fits import LAYOUTS, Net, Tracker, assert_like_one_process, batches_of, fit
from tests.hygiene import seed_everything
from tests.oracle import ReplicaBatches, quiet_trainer, rows_of
from tests.spmd import SpmdError, run_spmd

NUM_SAMPLES = 32
EIGHT = {**LAYOUTS["t2p2"], "data_parallel_size": 2, "micro_batch_size": 8}


class Numbered(Dataset):
    """Samples that know their number, with noise from the three generators of Python."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return {"id": index, "x": torch.tensor([index / NUM_SAMPLES, *noise]), "y": torch.tensor(1.0)}


class OwnBatches(BatchSampler):
    """A user's own."""


class Unrepeatable(Sampler):
    """Draws from the system's entropy."""

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        return iter(np.random.default_rng().permutation(NUM_SAMPLES).tolist())


def loader_of(kind):
    samples = Numbered()
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    weights = [1.0] * (NUM_SAMPLES // 2) + [3.0] * (NUM_SAMPLES // 2)
    arguments = {
        "shuffled": {"shuffle": True, "batch_size": 8},
        "weighted": {"sampler": WeightedRandomSampler(weights, NUM_SAMPLES), "batch_size": 8},
        "own batches": {"batch_sampler": OwnBatches(RandomSampler(samples), 8, drop_last=False)},
        "unrepeatable": {"sampler": Unrepeatable(), "batch_size": 8},
        "workers": {"shuffle": True, "batch_size": 8, **workers},
        "persistent workers": {"shuffle": True, "batch_size": 8, "persistent_workers": True, **workers},
    }[kind]
    return DataLoader(samples, **arguments)


class Seeing(Net):
    """Notes what it trains on: (epoch, ids, inputs)."""

    def on_train_batch_start(self, batch, batch_idx):
        self.notes.append((self.current_epoch, batch["id"].tolist(), batch["x"].tolist()))


def seen(kinds, strategy, use_distributed_sampler=True):
    """This rank's replica, and what it saw in two epochs of each kind of loader."""
    notes = {}
    for kind in kinds:
        seed_everything()
        module = Seeing()
        trainer = quiet_trainer(PTDPStrategy(**strategy), max_epochs=2, use_distributed_sampler=use_distributed_sampler)
        trainer.fit(module, loader_of(kind))
        notes[kind] = module.notes
    return trainer.strategy.groups.at.data, notes


def by_replica(results, kind):
    """What each replica saw, after a look that its ranks saw the same."""
    found = defaultdict(list)
    for replica, notes in results:
        found[replica].append(notes[kind])
    for ranks in found.values():
        assert all(notes == ranks[0] for notes in ranks)
    return [found[replica][0] for replica in sorted(found)]


def ids(notes, epoch):
    return [number for at, numbers, _ in notes if at == epoch for number in numbers]


def test_sampler_follows_the_replicas():
    results = run_spmd(seen, 8, 60, kinds=["shuffled", "own batches", "weighted"], strategy=EIGHT)
    for kind in ("shuffled", "own batches"):
        one, other = by_replica(results, kind)
        for epoch in range(2):
            assert len(ids(one, epoch)) == len(ids(other, epoch)) == NUM_SAMPLES // 2
            assert sorted(ids(one, epoch) + ids(other, epoch)) == list(range(NUM_SAMPLES))
        assert ids(one, 0) != ids(one, 1)
    one, other = by_replica(results, "weighted")
    drawn = ids(one, 0) + ids(other, 0)
    assert len(drawn) == NUM_SAMPLES
    assert sum(number >= NUM_SAMPLES // 2 for number in drawn) > NUM_SAMPLES // 2, "the heavy half, three to one"
    assert ids(one, 0) != ids(other, 0)


def test_own_sampler_is_left_alone():
    results = run_spmd(
        seen, 4, 60, kinds=["shuffled", "own batches"], strategy=LAYOUTS["p2d2"], use_distributed_sampler=False
    )
    for kind in ("shuffled", "own batches"):
        for notes in by_replica(results, kind):
            assert sorted(ids(notes, 0)) == list(range(NUM_SAMPLES)), "all of them, on each replica, as asked"


def test_peers_with_other_samples_are_told():
    with pytest.raises(SpmdError, match="the ranks of replica 0 see different batches"):
        run_spmd(seen, 4, 20, kinds=["unrepeatable"], strategy=LAYOUTS["p2d2"], use_distributed_sampler=False)


def test_workers_augment_alike_for_peers_and_apart_for_replicas():
    results = run_spmd(seen, 4, 60, kinds=["workers", "persistent workers"], strategy=LAYOUTS["p2d2"])
    for kind in ("workers", "persistent workers"):
        inputs = [x for notes in by_replica(results, kind) for _, _, xs in notes for x in xs]
        for generator in range(1, 4):
            assert len({x[generator] for x in inputs}) == len(inputs) == 2 * NUM_SAMPLES, "no two draws are the same"


class OfTwoLoaders(Net):
    """A batch of two parts, of which one may be missing."""

    def training_step(self, batch, batch_idx):
        parts = [part for part in (batch["a"], batch["b"]) if part is not None]
        return self.loss({name: torch.cat([part[name] for part in parts]) for name in ("x", "y")})


class TwoLoaders(pl.LightningDataModule):
    """mode: of the CombinedLoader; None gives Lightning the dict."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def train_dataloader(self):
        where = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}

        def loader(*sizes):
            mine = [rows_of(batch, where["rank"], where["num_replicas"]) for batch in batches_of(*sizes)]
            return DataLoader(mine, batch_size=None)

        loaders = {"a": loader(4, 4, 4), "b": loader(4, 4)}
        return loaders if self.mode is None else CombinedLoader(loaders, self.mode)


@pytest.mark.parametrize(
    ("layout", "mode"), [("p2d2", None), ("p2v2", "min_size"), ("d2", "max_size_cycle"), ("p2", "max_size")]
)
def test_several_loaders_in_every_mode(layout, mode):
    assert_like_one_process(layout, OfTwoLoaders, TwoLoaders(mode), trainer={"max_epochs": 2})


class Transferring(pl.LightningDataModule):
    """Changes batches on their way, at random too; fresh loaders each epoch."""

    def train_dataloader(self):
        return DataLoader(batches_of(4, 4, 2), batch_size=None, shuffle=True)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch["x"] + 0.1, "y": batch["y"]}

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device({"x": batch["x"] / 2, "y": batch["y"]}, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch["x"], "y": batch["y"] + torch.rand(())}


@pytest.mark.parametrize("layout", ["t2", "p2v2"])
def test_batches_may_change_on_their_way(layout):
    trainer = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    assert_like_one_process(layout, Net, Transferring(), trainer=trainer)


class ReadyBatches:
    """An iterable that is no DataLoader."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class UnevenBatches(pl.LightningDataModule):
    """Five for the first replica, four for the second."""

    def train_dataloader(self):
        return ReadyBatches(batches_of(*[2] * (5 - self.trainer.distributed_sampler_kwargs["rank"])))


def steps_over_batches(strategy):
    seed_everything()
    trainer = quiet_trainer(PTDPStrategy(**strategy), max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Net(), datamodule=UnevenBatches())
    return trainer.global_step, [str(warning.message) for warning in caught]


def test_epoch_ends_with_the_shortest_replica():
    results = run_spmd(steps_over_batches, 4, 20, strategy=LAYOUTS["p2d2"])
    assert [steps for steps, _ in results] == [8] * 4
    assert any("[5, 4] batches on replicas 0 to 1; an epoch ends after 4 on all" in text for text in results[0][1])


class StepsByIterator(Net):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss({name: column.double() for name, column in batch.items()})


def test_steps_that_fetch_their_batch_are_refused_under_a_pipeline():
    with pytest.raises(SpmdError, match="training_step takes dataloader_iter, and a pipeline must see the batch"):
        run_spmd(fit_by_iterator, 2, 20, strategy=LAYOUTS["p2"])


def fit_by_iterator(strategy):
    """The whole weights on rank 0."""
    seed_everything()
    tracker = Tracker()
    trainer = quiet_trainer(
        PTDPStrategy(**strategy), callbacks=[tracker], precision="64-true", use_distributed_sampler=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*`dataloader_iter`")
        trainer.fit(StepsByIterator(), datamodule=ReplicaBatches(batches_of(4, 4)))
    return tracker.fit.weights


@pytest.mark.parametrize("layout", ["t2", "d2"])
def test_steps_may_fetch_their_batch_without_a_pipeline(layout):
    one = fit(Net, batches_of(4, 4), None, {})
    found = run_spmd(fit_by_iterator, 2, 20, strategy=LAYOUTS[layout])[0]
    for name, value in one.weights.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-12)
