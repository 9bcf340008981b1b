"""All schedules give the gradients of one process, and run in the order that they are published in (PO-12)."""

from functools import partial

import pytest

from lightning_ptdp.schedule import compute_only, generate, lower, show
from tests.models import GPT, texts
from tests.oracle import assert_same, parallel, serial

SHAPES = [(2, 1, 1), (2, 1, 4), (4, 1, 2), (4, 1, 8), (2, 2, 4), (4, 2, 8)]
CASES = [(schedule, p, v, m, 1) for p, v, m in SHAPES for schedule in ("gpipe", "interleaved" if v > 1 else "1f1b")] + [
    ("1f1b", 2, 1, 4, 2),
    ("1f1b", 4, 1, 2, 2),
    ("interleaved", 2, 2, 4, 2),
    pytest.param("interleaved", 4, 2, 8, 2, marks=pytest.mark.slow),
]


def run_once(schedule, p, v, m, d):
    """One step on small layers, in as many microbatches of one row."""
    make = partial(GPT, num_layers=max(4, p * v), hidden=8, num_heads=2)
    batches = [texts(m * d, length=6)]
    sizes = {"pipeline_parallel_size": p, "virtual_pipeline_size": v, "data_parallel_size": d}
    return parallel(make, batches, schedule=schedule, micro_batch_size=1, **sizes), serial(make, batches)


@pytest.mark.parametrize(("schedule", "p", "v", "m", "d"), CASES)
def test_schedule_gives_the_gradients_of_one_process(schedule, p, v, m, d):
    (run, parts), one = run_once(schedule, p, v, m, d)
    assert_same(run, one, tolerance=1e-12)
    program = generate(schedule, pipeline_parallel_size=p, num_microbatches=m, virtual_pipeline_size=v)
    for part in parts:
        assert [span.action for span in part.spans] == list(lower(program)[part.at.pipeline])


def test_one_f_one_b_runs_as_drawn():
    (_, parts), _ = run_once("1f1b", 2, 1, 4, 1)
    by_rank = {part.at.pipeline: tuple(span.action for span in part.spans) for part in parts}
    assert show(compute_only((by_rank[0], by_rank[1]))) == [
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
