"""Draws a program, or the spans of a prediction or of a run, as text and as SVG."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from string import ascii_lowercase

from lightning_ptdp.schedule.action import COMPUTE, Action, Op, Program, Span
from lightning_ptdp.schedule.timing import bubble_share, makespan, unit_spans


def text(drawn: Program | Sequence[Span]) -> str:
    """Draw a line for each rank, time to the right: a forward is its microbatch's number, a backward (its number).

    Chunks are letters behind the number (`3b`) if there are several; dots are idle time. A forward of median length
    is as wide as its label, so of a measured run shorter actions lose the end of theirs.

        rank 0 |0 1 ......(0) (1) |
        rank 1 |..0 (0) 1 (1) ....|

    Raises:
        ValueError: there is nothing to draw, or the program deadlocks.
    """
    picture = _Picture.of(drawn)
    width = max(len(picture.label(span.action)) for span in picture.spans) + 1
    scale = width / picture.unit
    lines = [["."] * round(makespan(picture.spans) * scale) for _ in range(picture.p)]
    for span in picture.spans:
        start, end = (round((time - picture.start) * scale) for time in (span.start, span.end))
        label = picture.label(span.action)
        label = f"({label})" if span.action.op is Op.BACKWARD else label
        lines[span.rank][start:end] = label.ljust(end - start)[: end - start]
    digits = len(str(picture.p - 1))
    return "\n".join(f"rank {rank:>{digits}} |{''.join(line)}|" for rank, line in enumerate(lines))


_ROW, _GAP, _LEFT, _TOP, _MARGIN = 30, 4, 70, 62, 14
_FONT = "font-family='Helvetica, Arial, sans-serif'"
_SHADES = {
    Op.FORWARD: ("#1f4e9c", "#3f7fd0", "#7fb0ea", "#c3dcf8"),
    Op.BACKWARD: ("#1c6b3c", "#37985a", "#7cc596", "#c2e6cf"),
}
_IDLE, _INK = "#e6e6e6", "#1a1a1a"


def svg(drawn: Program | Sequence[Span], *, name: str = "") -> str:
    """Draw a picture as in figures 3 and 4 of the paper (SC'21), complete in itself.

    Forwards are blue and backwards green, later chunks lighter; idle time is grey; numbers are microbatches. The
    line below the title tells p, m, v and the bubble; `name` is the title.

    Raises:
        ValueError: there is nothing to draw, or the program deadlocks.
    """
    picture = _Picture.of(drawn)
    digits = max(len(str(span.action.microbatch)) for span in picture.spans)
    total = makespan(picture.spans)
    chart = min(max((9 * digits + 7) * total / picture.unit, 560.0), 4000.0)
    scale = chart / total
    bottom = _TOP + picture.p * (_ROW + _GAP)
    title = name or "pipeline schedule"
    parts = [
        _text(_LEFT, 26, title, size=16, anchor="start", weight="bold"),
        _text(_LEFT, 48, _sizes(picture), size=13, anchor="start"),
    ]
    for rank in range(picture.p):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(_text(_LEFT - 10, y + 20, f"rank {rank}", size=13, anchor="end"))
        parts.append(_rect(_LEFT, y, chart, _IDLE))
    for span in picture.spans:
        x, y = _LEFT + (span.start - picture.start) * scale, _TOP + span.rank * (_ROW + _GAP)
        parts.append(_rect(x, y, span.duration * scale, picture.shade(span.action), border=True))
        if span.duration * scale >= 8 * digits:
            ink = picture.ink(span.action)
            parts.append(_text(x + span.duration * scale / 2, y + 20, str(span.action.microbatch), size=13, ink=ink))
    parts += _legend(picture, bottom + 12, chart)
    width, height = _LEFT + chart + _MARGIN, bottom + 44
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' "
            f"height='{height:g}' role='img' {_FONT}>",
            f"<title>{escape(title)}: {_sizes(picture)}</title>",
            f"<rect width='{width:g}' height='{height:g}' fill='white'/>",
            *parts,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True, slots=True)
class _Picture:
    """What is drawn: the compute spans and the sizes they imply.

    unit: a forward's median duration, which is as wide as its label.
    """

    spans: tuple[Span, ...]
    start: float
    unit: float
    p: int
    m: int
    v: int

    @classmethod
    def of(cls, drawn: Program | Sequence[Span]) -> "_Picture":
        given = [item for item in drawn if isinstance(item, Span)]
        program: Program = tuple(item for item in drawn if not isinstance(item, Span))
        spans = tuple(span for span in given or unit_spans(program) if span.action.op in COMPUTE)
        forwards = [span.duration for span in spans if span.action.op is Op.FORWARD and span.duration > 0]
        if not forwards:
            raise ValueError("a drawing shows forwards and backwards; got no forward of a duration above 0")
        p = max(span.rank for span in spans) + 1
        stages = max(span.action.stage for span in spans) + 1
        return cls(
            spans=spans,
            start=min(span.start for span in spans),
            unit=statistics.median_low(forwards),
            p=p,
            m=max(span.action.microbatch for span in spans) + 1,
            v=-(-stages // p),
        )

    def label(self, action: Action) -> str:
        letter = ascii_lowercase[action.stage // self.p % len(ascii_lowercase)] if self.v > 1 else ""
        return f"{action.microbatch}{letter}"

    def shade(self, action: Action) -> str:
        return _SHADES[action.op][self._step(action.stage // self.p)]

    def ink(self, action: Action) -> str:
        return "white" if self._step(action.stage // self.p) < 2 else _INK

    def _step(self, chunk: int) -> int:
        """Which of the four shades: all chunks spread over them, a single one in the second."""
        return 1 if self.v == 1 else round(chunk * 3 / (self.v - 1))


def _sizes(picture: _Picture) -> str:
    sizes = f"p = {picture.p} ranks, m = {picture.m} microbatches, v = {picture.v} chunk{'s' * (picture.v > 1)} a rank"
    return f"{sizes}; bubble {100 * bubble_share(picture.spans):.1f} % of compute time"


def _legend(picture: _Picture, y: float, chart: float) -> list[str]:
    """For each op a row of boxes, one a chunk, and its name; then idle time and the direction of time."""
    ops = [op for op in _SHADES if any(span.action.op is op for span in picture.spans)]
    parts, x = [], float(_LEFT)
    for op in ops:
        for chunk in range(picture.v):
            example = Action(op, chunk * picture.p, 0)
            parts.append(_rect(x, y, 18, picture.shade(example), height=18))
            if picture.v > 1:
                parts.append(_text(x + 9, y + 13, str(chunk), size=11, ink=picture.ink(example)))
            x += 20
        words = op.name.lower() + (", by chunk" if picture.v > 1 else "")
        parts.append(_text(x + 4, y + 14, words, size=13, anchor="start"))
        x += 24 + 7 * len(words)
    parts.append(_rect(x, y, 18, _IDLE, height=18))
    parts.append(_text(x + 24, y + 14, "idle", size=13, anchor="start"))
    return [*parts, _text(_LEFT + chart, y + 14, "time \u2192", size=13, anchor="end")]


def _rect(x: float, y: float, width: float, fill: str, *, height: float = _ROW, border: bool = False) -> str:
    stroke = " stroke='white' stroke-width='1'" if border else ""
    return f"<rect x='{x:.2f}' y='{y:g}' width='{width:.2f}' height='{height:g}' fill='{fill}'{stroke}/>"


def _text(
    x: float, y: float, words: str, *, size: int, anchor: str = "middle", weight: str = "normal", ink: str = _INK
) -> str:
    ascii_words = escape(words).encode("ascii", "xmlcharrefreplace").decode()
    return (
        f"<text x='{x:.2f}' y='{y:g}' font-size='{size}' text-anchor='{anchor}' font-weight='{weight}' "
        f"fill='{ink}'>{ascii_words}</text>"
    )
