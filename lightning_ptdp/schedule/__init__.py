"""Pipeline schedules as values: generated, lowered, checked, timed, drawn. Standard library only."""

from lightning_ptdp.schedule.action import Action, Op, Program, Span, parse, show
from lightning_ptdp.schedule.check import check, live_activations
from lightning_ptdp.schedule.draw import svg, text
from lightning_ptdp.schedule.generate import (
    SCHEDULES,
    choose,
    forward_only,
    generate,
    gpipe,
    interleaved,
    max_live,
    one_f_one_b,
)
from lightning_ptdp.schedule.lower import lower
from lightning_ptdp.schedule.timing import bubble_share, makespan, timeline, unit_spans
from lightning_ptdp.schedule.tracks import compute_only, num_stages, peer

__all__ = [
    "Op",
    "Action",
    "Program",
    "Span",
    "show",
    "parse",
    "SCHEDULES",
    "choose",
    "generate",
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "forward_only",
    "max_live",
    "lower",
    "peer",
    "num_stages",
    "compute_only",
    "check",
    "live_activations",
    "timeline",
    "unit_spans",
    "makespan",
    "bubble_share",
    "text",
    "svg",
]
