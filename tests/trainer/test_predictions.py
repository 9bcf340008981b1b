"""Predictions are complete and in the order of the data on replica 0, and each is written by one replica."""

import copy
import warnings
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from tests.hygiene import seed_everything
from tests.models import Rows, Stream
from tests.trainer.evaluated import Loaders, Surveyed, in_one_process, num_replicas, numbered, on_every_rank, trainer


class Guess(NamedTuple):
    """Of each row its most likely next token, and its name."""

    tokens: torch.Tensor
    names: list[str]


class Predicting(Surveyed):
    """Predicts the next token of each row, in one of several forms."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        rows, scores = batch["row"].reshape(-1), self(batch["ids"].reshape(-1, 16))[:, -1]
        names = [f"row {row}" for row in rows.tolist()]
        return {
            "tensor": scores,
            "dict": {"scores": scores, "rows": rows, "names": names, "kind": "gpt", "count": len(rows)},
            "tuple": (scores, names),
            "named tuple": Guess(scores.argmax(-1), names),
            "strings": names,
            "arrays": {"scores": scores.numpy(), "by row": [{"row": row} for row in rows.tolist()]},
            "nothing": None,
        }[self.form]


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self, interval):
        super().__init__(interval)
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((dataloader_idx, batch_indices, prediction))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append(copy.deepcopy((predictions, batch_indices)))


class Given:
    """A batch sampler that knows its batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class OwnBatches(Loaders):
    """Predicts on loaders that an ordinary data module may have. kind: which."""

    def __init__(self, kind):
        super().__init__([5], 2)
        self.kind = kind

    def predict_dataloader(self):
        rows = numbered(5)
        if self.kind == "no batches":
            return DataLoader(Rows(rows), batch_size=None)
        if self.kind == "a stream":
            return DataLoader(Stream(rows), batch_size=1)
        return DataLoader(Rows(rows), batch_sampler=Given([[4, 3], [0], [1, 2]]))


def predicted(layout, data, form="tensor", interval=None, strategy=None, returns=True, **arguments):
    """What `predict` returned, and what the writer was given."""
    seed_everything()
    writer = Writer(interval or "batch")
    run = trainer(layout, strategy=strategy, callbacks=[writer] if interval else [], **arguments)
    warnings.filterwarnings("ignore", "You are using a custom batch sampler")  # Lightning's, in one process too
    loaders = OwnBatches(data) if isinstance(data, str) else Loaders(**data)
    found = run.predict(Predicting(form), datamodule=loaders, return_predictions=returns)
    return found, writer.batches, writer.epochs


def plainly_predicted(layout, data, **options):
    """The predictions of one process that reads the batches of one replica."""
    if not isinstance(data, str):
        data = data | {"batch_size": data["batch_size"] // num_replicas(layout)}
    return in_one_process(predicted, data=data, **options)[0]


def on_replica_0(layout, results):
    return [result for rank, result in enumerate(results) if rank % num_replicas(layout) == 0]


def assert_same_structure(found, expected):
    mine, spec = pytree.tree_flatten(found)
    wanted, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for one, other in zip(mine, wanted, strict=True):
        if isinstance(other, str | int | None):
            assert one == other
        else:
            assert type(one) is type(other)
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["tensor", "dict", "tuple", "named tuple", "strings", "arrays"])
def test_every_form_is_complete_and_in_order(form):
    data = {"sizes": [7], "batch_size": 4}
    expected = plainly_predicted("p2d2", data, form=form)
    for strategy in ({}, {"eval_micro_batch_size": 1}):
        results = on_every_rank(predicted, "p2d2", data=data, form=form, strategy=strategy)
        for found, _, _ in on_replica_0("p2d2", results):
            assert_same_structure(found, expected)


@pytest.mark.parametrize("layout", ["t2", "d4", "t2p2v2"])
def test_several_loaders_in_every_layout(layout):
    data = {"sizes": [7, 1], "batch_size": 4}
    expected = plainly_predicted(layout, data, form="dict")
    for found, _, _ in on_replica_0(layout, on_every_rank(predicted, layout, data=data, form="dict")):
        assert_same_structure(found, expected)


@pytest.mark.parametrize(("limit", "num_batches"), [(1, 2), (0.5, 2), (1.0, 3)])
def test_limits_count_batches_of_all_replicas(limit, num_batches):
    results = on_every_rank(
        predicted, "d2", data={"sizes": [5], "batch_size": 4}, form="strings", limit_predict_batches=limit
    )
    assert results[0][0] == [["row 0", "row 1"], ["row 2", "row 3"], ["row 4"]][:num_batches]


@pytest.mark.parametrize("kind", ["batches of the user", "no batches"])
def test_loaders_of_other_kinds_are_split_too(kind):
    expected = plainly_predicted("d2", kind, form="strings")
    (found, _, _), _ = on_every_rank(predicted, "d2", data=kind, form="strings")
    assert found == expected


@pytest.mark.parametrize(
    ("data", "options"), [("a stream", {}), ({"sizes": [5], "batch_size": 2}, {"use_distributed_sampler": False})]
)
def test_what_the_strategy_does_not_split_it_does_not_join(data, options):
    expected = plainly_predicted("d2", data, form="strings")
    for found, _, _ in on_every_rank(predicted, "d2", data=data, form="strings", **options):
        assert found == expected


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_each_replica_writes_its_own(interval, returns):
    data = {"sizes": [7, 1], "batch_size": 4}
    results = on_every_rank(predicted, "p2d2", data=data, form="strings", interval=interval, returns=returns)
    batches = [
        [(0, [0, 1], ["row 0", "row 1"]), (0, [4, 5], ["row 4", "row 5"]), (1, [0], ["row 7"])],
        [(0, [2, 3], ["row 2", "row 3"]), (0, [6], ["row 6"])],
    ]
    epochs = [
        ([[["row 0", "row 1"], ["row 4", "row 5"]], [["row 7"]]], [[[0, 1], [4, 5]], [[0]]]),
        ([[["row 2", "row 3"], ["row 6"]], []], [[[2, 3], [6]], []]),
    ]
    for rank, (found, by_batch, by_epoch) in enumerate(results):
        replica = rank % 2
        assert by_batch == (batches[replica] if "batch" in interval else [])
        assert by_epoch == ([epochs[replica]] if "epoch" in interval else [])
        if not returns:
            assert found is None
        elif replica == 0:
            assert found == [[["row 0", "row 1"], ["row 2", "row 3"], ["row 4", "row 5"], ["row 6"]], [["row 7"]]]
        else:
            assert found == epochs[1][0]
