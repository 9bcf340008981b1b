"""Finds one order in which all ranks can run a program, or proves that there is none."""

from collections import deque
from collections.abc import Iterator, Mapping

from lightning_ptdp.schedule.action import COMPUTE, Action, Program
from lightning_ptdp.schedule.tracks import Track


def track_lengths(program: Program) -> dict[Track, int]:
    """Count the microbatches that each track of a program runs.

    Raises:
        ValueError: a track does not run microbatches 0, 1, 2, ... in this order, each once.
    """
    lengths: dict[Track, int] = {}
    for rank, steps in enumerate(program):
        for action in steps:
            track = (action.op, action.stage)
            due = lengths.get(track, 0)
            if action.microbatch != due:
                raise ValueError(
                    f"each stage takes microbatches 0, 1, 2, ... in this order, each once; rank {rank} has {action} "
                    f"where {action.stage}{action.op}{due} is due"
                )
            lengths[track] = due + 1
    return lengths


def execution_order(program: Program, needs: Mapping[Track, tuple[Track, ...]]) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action) once, in an order in which no rank acts before what it needs is there.

    Ranks run their steps in sequence and stand still at an action until all it needs is there: a compute is there
    when it is done, a send or a receive as soon as its rank has reached it. So a message that needs its peer blocks
    on both sides (rendezvous). Time is linear in the number of actions.

    Args:
        program: one tuple of actions a rank.
        needs: for each track those of which the same microbatch must be there first, on any rank.

    Raises:
        ValueError: a deadlock, with where every rank stands; or as `track_lengths`.
    """
    there = dict.fromkeys(track_lengths(program), 0)
    position = [0] * len(program)
    waiting: dict[Track, list[int]] = {}
    runnable = deque(range(len(program)))
    while runnable:
        rank = runnable.popleft()
        steps = program[rank]
        while position[rank] < len(steps):
            action = steps[position[rank]]
            track, microbatch = (action.op, action.stage), action.microbatch
            if action.op not in COMPUTE:
                there[track] = microbatch + 1
                runnable.extend(waiting.pop(track, ()))
            missing = _first_missing(needs[track], there, microbatch)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            position[rank] += 1
            yield rank, action
            there[track] = microbatch + 1
            runnable.extend(waiting.pop(track, ()))
    if any(position[rank] < len(steps) for rank, steps in enumerate(program)):
        raise ValueError(_deadlock(program, position, needs, there))


def _first_missing(needs: tuple[Track, ...], there: Mapping[Track, int], microbatch: int) -> Track | None:
    for need in needs:
        if there.get(need, 0) <= microbatch:
            return need
    return None


def _deadlock(
    program: Program, position: list[int], needs: Mapping[Track, tuple[Track, ...]], there: Mapping[Track, int]
) -> str:
    places = []
    for rank, (steps, step) in enumerate(zip(program, position, strict=True)):
        if step == len(steps):
            places.append(f"rank {rank} has finished")
            continue
        action = steps[step]
        missing = _first_missing(needs[action.op, action.stage], there, action.microbatch)
        assert missing is not None, f"rank {rank} stopped at {action} without cause"
        awaited = Action(*missing, action.microbatch)
        places.append(f"rank {rank} stands at step {step}, {action}, and waits for {awaited}")
    return f"deadlock: {'; '.join(places)}; on every rank an action must come after what it waits for"
