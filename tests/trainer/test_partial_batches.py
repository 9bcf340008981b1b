"""Batches that do not divide, and the last one of an epoch, through an ordinary DataLoader (PO-04)."""

import pytest

from tests.models import GPT, TrainRows, texts
from tests.oracle import assert_same, parallel, serial


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "b", "sizes"),
    [(10, 4, 1, (4, 4, 2)), (8, 8, 3, (8,)), (2, 4, 1, (2,))],
    ids=["a last batch of half the rows", "microbatches of 3, 3 and 2 rows", "an epoch of half a batch"],
)
def test_epoch_equals_one_process(num_rows, batch_size, b, sizes):
    rows = texts(num_rows)
    run, _ = parallel(GPT, TrainRows(rows, batch_size=batch_size), pipeline_parallel_size=2, micro_batch_size=b)
    assert len(run.losses) == len(sizes)
    assert_same(run, serial(GPT, list(batches(rows, sizes))))


def batches(rows, sizes):
    start = 0
    for size in sizes:
        yield {name: column[start : start + size] for name, column in rows.items()}
        start += size
