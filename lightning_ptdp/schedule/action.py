"""The words a schedule is written in: operations, actions, programs, and the spans they take in time."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What a pipeline rank can be told to do with one microbatch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD})


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank; prints as stage, op, microbatch: `2F0`.

    The stage is the one whose rank acts: stage 0 sends its output as `0SA3`, and stage 1 receives it as `1RA3`.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


Program = tuple[tuple[Action, ...], ...]
"""program[pipeline rank][step]; stage s lies on pipeline rank s % p, where p = len(program)."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank was, or will be, busy with an action; start and duration in seconds or in units of the caller."""

    rank: int
    start: float
    duration: float
    action: Action

    @property
    def end(self) -> float:
        return self.start + self.duration


def show(program: Program) -> list[str]:
    """Write a program as text, one line a rank: `["0F0 0B0", "1F0 1B0"]`."""
    return [" ".join(map(str, steps)) for steps in program]


def parse(lines: Iterable[str]) -> Program:
    """Read what `show` wrote.

    Raises:
        ValueError: a word is not an action; names the rank and the word.
    """
    return tuple(tuple(_parse_action(word, rank) for word in line.split()) for rank, line in enumerate(lines))


_ACTION = re.compile(rf"([0-9]+)({'|'.join(Op)})([0-9]+)")


def _parse_action(word: str, rank: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ValueError(
            f"an action is written stage, op, microbatch, as in 2F0; got {word!r} on the line of rank {rank}; "
            f"ops are {', '.join(Op)}"
        )
    stage, op, microbatch = match.groups()
    return Action(Op(op), int(stage), int(microbatch))
