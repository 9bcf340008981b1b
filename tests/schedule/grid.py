"""The cases that property tests run over."""

from collections.abc import Iterator
from functools import cache

from lightning_ptdp.schedule import Program, generate

ALL = ("gpipe", "1f1b", "interleaved", "forward_only")


def chunk_counts(schedule: str) -> range:
    return range(1, 2) if schedule == "1f1b" else range(1, 5)


def microbatch_counts(p: int) -> list[int]:
    """Every m up to 4p for p <= 4; above, those next to a multiple of p, and some between.

    A schedule differs only in its first two groups of p microbatches and in its last one.
    """
    if p <= 4:
        return list(range(1, 4 * p + 1))
    return [1, 2, p // 2, p - 1, p, p + 1, p + p // 2, 2 * p - 1, 2 * p, 2 * p + 1, 4 * p - 1]


def cases(schedule: str, p: int) -> Iterator[tuple[int, int, Program]]:
    """Every (m, v, bare program) of a schedule on p ranks."""
    for v in chunk_counts(schedule):
        for m in microbatch_counts(p):
            yield m, v, program(schedule, p, m, v)


@cache
def program(schedule: str, p: int, m: int, v: int) -> Program:
    return generate(schedule, pipeline_parallel_size=p, num_microbatches=m, virtual_pipeline_size=v)
