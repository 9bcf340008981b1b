"""Proves that a program can run, or says why not."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_ptdp.schedule.action import COMPUTE, Action, Op, Program
from lightning_ptdp.schedule.order import execution_order, track_lengths
from lightning_ptdp.schedule.tracks import Track, compute_needs, has_messages, message_needs, num_stages, trains, wires


def check(program: Program, *, max_live: Sequence[int] | None = None) -> None:
    """Prove a program, bare or lowered; return if it holds.

    What holds then:

    - stage s is on rank s % p, and every rank has the same number of stages, v;
    - each stage runs microbatches 0, 1, ..., m-1 in this order, forwards and backwards (a program without any
      backward is forward-only, and holds too);
    - a backward follows its own forward, and every compute the neighbour stage's compute that feeds it;
    - in a lowered program each compute follows its receive and each send its compute, and for each (source,
      destination) sends and receives pair one to one in the same order, for the wire has no tags;
    - there is no deadlock, though a send and a receive both block until the other side has started its own;
    - no rank holds more stage inputs than max_live[rank].

    Args:
        program: program[pipeline rank][step].
        max_live: for each rank the bound of `live_activations`; not checked if None.

    Raises:
        ValueError: the first rule that is broken, with the rank and the action.
    """
    stages, lowered = num_stages(program), has_messages(program)
    needs = message_needs(stages) if lowered else compute_needs(stages)
    _check_placement(program, needs, stages=stages)
    _check_complete(program, needs)
    if lowered:
        _check_wires(program, stages)
    for _ in execution_order(program, needs):
        pass
    if max_live is not None:
        _check_live(program, max_live)


def live_activations(program: Program) -> list[int]:
    """Count for each rank the most stage inputs that it holds at once, each from its forward to its backward.

    All are 0 in a forward-only program, which keeps nothing for a backward.
    """
    if not trains(program):
        return [0] * len(program)
    return [max(_live(steps), default=0) for steps in program]


def _live(steps: Sequence[Action]) -> list[int]:
    """Count the stage inputs held after each step."""
    held, after = 0, []
    for action in steps:
        held += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
        after.append(held)
    return after


def _check_placement(program: Program, needs: Mapping[Track, tuple[Track, ...]], *, stages: int) -> None:
    p = len(program)
    if stages == 0 or stages % p:
        raise ValueError(f"p ranks run v stages each, v at least 1; got {stages} stages on p={p} ranks")
    for rank, steps in enumerate(program):
        for op, stage in dict.fromkeys((action.op, action.stage) for action in steps):
            if stage % p != rank:
                raise ValueError(f"stage s lies on rank s % p; got {op} of stage {stage} on rank {rank}, p={p}")
            if (op, stage) not in needs or (op not in COMPUTE and p == 1):
                raise ValueError(
                    f"messages go between neighbouring stages on two ranks; got {op} of stage {stage} on rank {rank}, "
                    f"which has no other end among {stages} stages on p={p} ranks"
                )


def _check_complete(program: Program, needs: Mapping[Track, tuple[Track, ...]]) -> None:
    """Check that every track that the program must have runs all m microbatches."""
    lengths = track_lengths(program)
    m = max(lengths.values())
    skipped = () if trains(program) else (Op.BACKWARD, Op.SEND_GRADIENT, Op.RECV_GRADIENT)
    for op, stage in needs:
        length = lengths.get((op, stage), 0)
        if length != m and op not in skipped:
            raise ValueError(
                f"each stage takes every microbatch; stage {stage} on rank {stage % len(program)} has {length} of "
                f"m={m} {op}: {stage}{op}{length} is missing"
            )


def _check_wires(program: Program, stages: int) -> None:
    """Check that the n-th send from one rank to another is what the other receives n-th from it."""
    p = len(program)
    receive_of = wires(stages)
    send_of = {receive: send for send, receive in receive_of.items()}
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, steps in enumerate(program):
        for action in steps:
            track = (action.op, action.stage)
            if track in receive_of:
                sent[rank, receive_of[track][1] % p].append(action)
            elif track in send_of:
                received[send_of[track][1] % p, rank].append(action)
    for wire in sorted(sent):
        for n, (send, receive) in enumerate(zip(sent[wire], received[wire], strict=True)):
            if receive_of[send.op, send.stage] != (receive.op, receive.stage) or send.microbatch != receive.microbatch:
                raise ValueError(
                    f"messages from one rank to another arrive in the order in which they are sent; message {n} from "
                    f"rank {wire[0]} to rank {wire[1]} is sent as {send} and received as {receive}"
                )


def _check_live(program: Program, max_live: Sequence[int]) -> None:
    if len(max_live) != len(program):
        raise ValueError(f"max_live has one bound a rank; got {len(max_live)} bounds for {len(program)} ranks")
    for rank, (peak, bound) in enumerate(zip(live_activations(program), max_live, strict=True)):
        if peak > bound:
            step = _live(program[rank]).index(peak)
            raise ValueError(
                f"rank {rank} holds {peak} stage inputs after step {step}, {program[rank][step]}; its bound is "
                f"{bound}; run backwards earlier"
            )
