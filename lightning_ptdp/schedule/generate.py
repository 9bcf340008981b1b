"""The schedules: who runs which stage of which microbatch, in which order.

Letters: p pipeline ranks, m microbatches a batch, v chunks a rank; stage = chunk * p + rank. Every schedule is made of
one order of forwards, one order of backwards, and a number of warm-up forwards:

    warm-up forwards | forward, backward, forward, backward, ... | remaining backwards

Each stage takes its microbatches in ascending order, forwards and backwards, so all schedules add gradients in the
same order.
"""

from lightning_ptdp.schedule.action import Action, Op, Program

SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""The schedules that train. `generate` knows "forward_only" besides."""


def choose(schedule: str = "auto", *, pipeline_parallel_size: int, virtual_pipeline_size: int) -> str:
    """Settle which of SCHEDULES to train with; "auto" is "interleaved" if a rank has several chunks, else "1f1b".

    Raises:
        ValueError: the schedule is unknown, does not fit the number of chunks, or a size is below 1.
    """
    _check_sizes(p=pipeline_parallel_size, v=virtual_pipeline_size)
    if schedule == "auto":
        return "interleaved" if virtual_pipeline_size > 1 else "1f1b"
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be 'auto' or one of {SCHEDULES}; got {schedule!r}")
    if schedule == "1f1b":
        _check_one_chunk(virtual_pipeline_size)
    return schedule


def generate(
    schedule: str, *, pipeline_parallel_size: int, num_microbatches: int, virtual_pipeline_size: int = 1
) -> Program:
    """Make the program of a schedule: forwards and backwards, without messages (`lower` adds them).

    Args:
        schedule: one of SCHEDULES, or "forward_only".
        pipeline_parallel_size: p, at least 1.
        num_microbatches: m, at least 1. Need not be a multiple of p, nor reach it.
        virtual_pipeline_size: v, at least 1; "1f1b" takes 1 only.

    Raises:
        ValueError: the schedule is unknown, does not fit the number of chunks, or a size is below 1.
    """
    p, m, v = pipeline_parallel_size, num_microbatches, virtual_pipeline_size
    match schedule:
        case "gpipe":
            return gpipe(p=p, m=m, v=v)
        case "1f1b":
            _check_one_chunk(v)
            return one_f_one_b(p=p, m=m)
        case "interleaved":
            return interleaved(p=p, m=m, v=v)
        case "forward_only":
            return forward_only(p=p, m=m, v=v)
    raise ValueError(f"schedule must be one of {(*SCHEDULES, 'forward_only')}; got {schedule!r}")


def gpipe(*, p: int, m: int, v: int = 1) -> Program:
    """All forwards, then all backwards; with several chunks, each chunk takes all microbatches before the next one.

    Source: GPipe (Huang et al., 2019), SC'21 figure 3; for v > 1 breadth-first (Lamy-Poirier, 2023).
    """
    _check_sizes(p=p, m=m, v=v)
    work = _grouped(m, v, group=m)
    return tuple(_steps(work, rank=rank, p=p, v=v, num_warmup=m * v) for rank in range(p))


def one_f_one_b(*, p: int, m: int) -> Program:
    """Forwards until the last rank has work, then a forward and a backward in turn (PipeDream-Flush).

    Source: SC'21 figure 4 top, section 2.2.1.
    """
    _check_sizes(p=p, m=m)
    work = _grouped(m, 1, group=m)
    return tuple(_steps(work, rank=rank, p=p, v=1, num_warmup=p - rank - 1) for rank in range(p))


def interleaved(*, p: int, m: int, v: int) -> Program:
    """1F1B over v chunks a rank, which take turns in groups of p microbatches.

    For m a multiple of p this is the order of Megatron-LM. For any other m it is the order for the next multiple, with
    the absent microbatches left out of the last group. Nothing waits on an absent one, so this runs wherever the
    padded program does, never longer, and never with more live activations.

    Megatron-LM of 2021 made one exception: for m == p all forwards came first. That has the same bubble, and
    holds m v activations on every rank; the order without it, taken here and by later versions, holds fewer.

    Source: SC'21 figure 4 bottom, section 2.2.2; Megatron-LM core/pipeline_parallel/schedules.py for the warm-up.
    """
    _check_sizes(p=p, m=m, v=v)
    work = _grouped(_next_multiple(m, p), v, group=p)
    padded = (_steps(work, rank=rank, p=p, v=v, num_warmup=2 * (p - rank - 1) + (v - 1) * p) for rank in range(p))
    return tuple(tuple(action for action in steps if action.microbatch < m) for steps in padded)


def forward_only(*, p: int, m: int, v: int = 1) -> Program:
    """The forwards of `interleaved` alone, for validation and prediction."""
    return tuple(tuple(action for action in steps if action.op is Op.FORWARD) for steps in interleaved(p=p, m=m, v=v))


def max_live(schedule: str, *, p: int, m: int, v: int, rank: int) -> int:
    """Bound the stage inputs that a rank holds at once, from their forward to their backward; the bound is reached.

    p: pipeline ranks. m: microbatches. v: chunks a rank. rank: pipeline rank, 0..p-1.

        gpipe        m v
        1f1b         min(m, p - rank)
        interleaved  (v - 1) min(m, p) + min(m, 2 (p - rank) - 1)
        forward_only 0: nothing is kept for a backward

    For interleaved and m a multiple of p this is Megatron-LM's warm-up and one more, or all there is:
    min(m v, 2 (p - rank - 1) + (v - 1) p + 1). For other m, leave the absent microbatches out of that padded order. Up
    to its first backward a rank runs the first v - 1 chunks of the first group, min(m, p) present in each, and then
    2 (p - rank) - 1 forwards of microbatches 0, 1, 2, ..., m of them present at most. From there on forwards and
    backwards alternate, and where a backward is absent its forward is absent too, so no later peak is higher.
    """
    _check_sizes(p=p, m=m, v=v)
    if not 0 <= rank < p:
        raise ValueError(f"rank must lie in 0..p-1; got rank={rank}, p={p}")
    match schedule:
        case "gpipe":
            return m * v
        case "1f1b":
            _check_one_chunk(v)
            return min(m, p - rank)
        case "interleaved":
            return (v - 1) * min(m, p) + min(m, 2 * (p - rank) - 1)
        case "forward_only":
            return 0
    raise ValueError(f"schedule must be one of {(*SCHEDULES, 'forward_only')}; got {schedule!r}")


def _steps(work: list[tuple[int, int]], *, rank: int, p: int, v: int, num_warmup: int) -> tuple[Action, ...]:
    """One rank's steps: the warm-up forwards, then a forward and a backward in turn, then the remaining backwards.

    work: (chunk, microbatch) in the order of the forwards; the backwards take the chunks in reverse.
    """
    forwards = [Action(Op.FORWARD, chunk * p + rank, microbatch) for chunk, microbatch in work]
    backwards = [Action(Op.BACKWARD, (v - 1 - chunk) * p + rank, microbatch) for chunk, microbatch in work]
    turns = zip(forwards[num_warmup:], backwards, strict=False)
    num_turns = max(len(work) - num_warmup, 0)
    return (*forwards[:num_warmup], *(action for turn in turns for action in turn), *backwards[num_turns:])


def _grouped(m: int, v: int, *, group: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) for all, where a group of microbatches passes all chunks before the next group starts."""
    return [
        (chunk, microbatch)
        for first in range(0, m, group)
        for chunk in range(v)
        for microbatch in range(first, first + group)
    ]


def _next_multiple(m: int, p: int) -> int:
    return -(-m // p) * p


def _check_sizes(*, p: int, v: int = 1, m: int = 1) -> None:
    names = {"pipeline_parallel_size (p)": p, "num_microbatches (m)": m, "virtual_pipeline_size (v)": v}
    for name, size in names.items():
        if size < 1:
            raise ValueError(f"{name} counts from 1; got {size}")


def _check_one_chunk(v: int) -> None:
    if v != 1:
        raise ValueError(
            f"1f1b runs one chunk a rank; got virtual_pipeline_size={v}; use schedule='interleaved', "
            "or virtual_pipeline_size=1"
        )
