"""Tells when each action of a program runs, given what actions cost."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from lightning_ptdp.schedule.action import COMPUTE, Action, Op, Program, Span
from lightning_ptdp.schedule.order import execution_order
from lightning_ptdp.schedule.tracks import Track, compute_needs, compute_only, num_stages, producers


def timeline(program: Program, *, cost: Callable[[Action], float], hop: Callable[[Action], float]) -> list[Span]:
    """Run a program on a clock: each compute starts when its rank is free and its input has arrived.

    Messages are overlapped with compute, as the runtime does it (post early, wait at the consumer): they delay the
    consumer but occupy no rank. Sends and receives of a lowered program are therefore left out, and a bare program
    and its lowered form have the same timeline.

    Args:
        program: bare or lowered.
        cost: duration of a forward or backward. A mapping serves as `costs.__getitem__`.
        hop: for a forward or backward, how long its input is on the wire: the least time from the end of the
            neighbour's action that feeds it to its own start. Not asked where both stages share a rank.

    Returns:
        One span for each forward and backward, rank by rank, in the order of the program, in the unit of `cost`.

    Raises:
        ValueError: the program deadlocks.
    """
    program = compute_only(program)
    stages = num_stages(program)
    feeder = producers(stages)
    spans: list[list[Span]] = [[] for _ in program]
    free = [0.0] * len(program)
    ends: dict[Track, list[float]] = defaultdict(list)
    for rank, action in execution_order(program, compute_needs(stages)):
        track = (action.op, action.stage)
        start = free[rank]
        if track in feeder:
            wire = hop(action) if len(program) > 1 else 0.0
            start = max(start, ends[feeder[track]][action.microbatch] + wire)
        duration = cost(action)
        free[rank] = start + duration
        ends[track].append(free[rank])
        spans[rank].append(Span(rank, start, duration, action))
    return [span for row in spans for span in row]


def unit_spans(program: Program, *, forward: float = 1.0, backward: float = 2.0, hop: float = 0.0) -> list[Span]:
    """The timeline of a model whose stages all cost the same, as the figures of the paper assume.

    Args:
        program: bare or lowered, on p ranks of v chunks.
        forward: duration of a microbatch's forward through all chunks of a rank; through one chunk forward/v.
        backward: the same for the backward. The paper draws it twice as long as the forward.
        hop: delay of each message between two ranks.
    """
    v = (num_stages(program) or 1) / (len(program) or 1)
    costs = {Op.FORWARD: forward / v, Op.BACKWARD: backward / v}
    return timeline(program, cost=lambda action: costs[action.op], hop=lambda _: hop)


def makespan(spans: Iterable[Span]) -> float:
    """Time from the first start to the last end of spans, of which there is at least one."""
    spans = tuple(spans)
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble_share(spans: Iterable[Span]) -> float:
    """Idle time of all ranks over their compute time (the ideal time), as the paper defines it.

    At least one span must have a duration above 0. If this is x, the idle part of all time is x / (1 + x).

    Source: SC'21 section 2.2.
    """
    spans = tuple(span for span in spans if span.action.op in COMPUTE)
    compute = sum(span.duration for span in spans)
    num_ranks = max(span.rank for span in spans) + 1
    return (num_ranks * makespan(spans) - compute) / compute
