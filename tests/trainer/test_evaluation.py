"""Validation and test give the numbers of one process, and count each sample once."""

import warnings
from typing import Any

import pytest

from tests.hygiene import seed_everything
from tests.trainer.evaluated import EMPTY_LOADER, Loaders, Surveyed, in_one_process, on_every_rank, once, trainer

CASES: dict[str, dict[str, Any]] = {
    "odd": {"data": {"sizes": [5], "batch_size": 2}},
    "last batch of three": {"data": {"sizes": [11], "batch_size": 4}},
    "fewer samples than replicas": {"data": {"sizes": [1], "batch_size": 2}},
    "test": {"data": {"sizes": [7], "batch_size": 2}, "name": "test"},
    "several loaders": {"data": {"sizes": [5, 1, 4], "batch_size": 2}},
    "an empty loader": {"data": {"sizes": [3, 0, 4], "batch_size": 2}},
    "limit of batches": {"data": {"sizes": [5, 3], "batch_size": 2}, "limit_val_batches": 2},
    "limit as a part": {"data": {"sizes": [9], "batch_size": 2}, "limit_val_batches": 0.5},
    "fast_dev_run": {"data": {"sizes": [5], "batch_size": 2}, "fast_dev_run": True},
    "drop_last": {"data": {"sizes": [7], "batch_size": 4, "drop_last": True}},
    "sequential": {"data": {"sizes": [5, 3], "batch_size": 2, "mode": "sequential"}},
    "min_size": {"data": {"sizes": [5, 5], "batch_size": 2, "mode": "min_size"}},
    "max_size": {"data": {"sizes": [6, 2], "batch_size": 2, "mode": "max_size"}},
    "max_size_cycle": {"data": {"sizes": [6, 4], "batch_size": 2, "mode": "max_size_cycle"}},
}


def evaluated(layout, data, name="validate", strategy=None, **arguments):
    """The metrics of each loader."""
    seed_everything()
    warnings.filterwarnings("ignore", EMPTY_LOADER)
    run = trainer(layout, strategy=strategy, **arguments)
    return getattr(run, name)(Surveyed(), datamodule=Loaders(**data), verbose=False)


def assert_as_in_one_process(layout, case, strategy=None):
    expected = in_one_process(evaluated, **case)
    for metrics in on_every_rank(evaluated, layout, strategy=strategy, **case):
        for found, wanted in zip(metrics, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)  # Lightning and the metric add up in float32
    return expected


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_one_process(case):
    assert_as_in_one_process("p2d2", CASES[case])


@pytest.mark.parametrize("layout", ["t2", "d4", "t2p2v2"])
def test_every_layout_counts_each_row_once(layout):
    (metrics,) = assert_as_in_one_process(layout, {"data": {"sizes": [5], "batch_size": 4}})
    assert metrics["seen"] == once(range(5))


@pytest.mark.parametrize("size", [1, 3])
def test_microbatches_change_nothing(size):
    assert_as_in_one_process("p2d2", {"data": {"sizes": [11], "batch_size": 8}}, {"eval_micro_batch_size": size})


def refused(layout, data):
    try:
        evaluated(layout, data)
    except Exception as error:  # the cause on one rank, a peer's message on the others
        return str(error)
    return None


def test_combined_batch_of_which_only_a_part_counts_is_refused():
    told = on_every_rank(refused, "d2", data={"sizes": [4, 3], "batch_size": 2, "mode": "min_size"})
    assert all("those of loaders [1] have no such batch" in text for text in told)
