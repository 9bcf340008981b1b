from xml.etree import ElementTree

import pytest

from lightning_ptdp.schedule import (
    Action,
    Op,
    Span,
    forward_only,
    gpipe,
    interleaved,
    lower,
    one_f_one_b,
    svg,
    text,
    unit_spans,
)


def test_text_of_one_f_one_b_is_this_drawing():
    assert text(one_f_one_b(p=2, m=3)).splitlines() == [
        "rank 0 |0 1 ....(0) 2 (1) ..(2) |",
        "rank 1 |..0 (0) 1 (1) 2 (2) ....|",
    ]


def test_text_marks_chunks_by_letters():
    assert text(interleaved(p=2, m=2, v=2)).splitlines() == [
        "rank 0 |0a 1a 0b 1b ......(0b)  ...(1b)  (0a)  (1a)  |",
        "rank 1 |...0a 1a 0b (0b)  1b (1b)  (0a)  (1a)  ......|",
    ]


def test_lines_are_equally_long_for_many_ranks_and_microbatches():
    lines = text(gpipe(p=11, m=12)).splitlines()
    assert len(lines) == 11
    assert len({len(line) for line in lines}) == 1
    assert lines[0].startswith("rank  0 |0  1  2 ")


def test_a_plan_and_a_run_are_drawn_from_spans():
    program = one_f_one_b(p=2, m=3)
    later = [Span(span.rank, span.start + 100.0, span.duration, span.action) for span in unit_spans(program)]
    assert text(later) == text(program) == text(lower(program))
    assert svg(later) == svg(program) == svg(lower(program))


def test_measured_spans_of_any_length_are_drawn():
    spans = [
        Span(0, 0.0, 1.00, Action(Op.FORWARD, 0, 0)),
        Span(0, 1.1, 0.01, Action(Op.FORWARD, 0, 1)),
        Span(0, 1.5, 3.70, Action(Op.BACKWARD, 0, 0)),
        Span(0, 5.2, 1.00, Action(Op.FORWARD, 0, 2)),
    ]
    assert text(spans) == "rank 0 |0 .(0)    2 |"


SVG = "{http://www.w3.org/2000/svg}"


def test_svg_has_a_box_for_each_action_and_tells_the_sizes():
    drawing = ElementTree.fromstring(svg(interleaved(p=2, m=4, v=2), name="interleaved"))
    words = [element.text for element in drawing.iter(f"{SVG}text")]
    assert "interleaved" in words
    assert "p = 2 ranks, m = 4 microbatches, v = 2 chunks a rank; bubble 12.5 % of compute time" in words
    boxes = [box for box in drawing.iter(f"{SVG}rect") if box.get("stroke")]
    assert len(boxes) == 2 * 2 * 2 * 4
    assert len({box.get("fill") for box in boxes}) == 4  # forward and backward, two chunks


def test_svg_is_ascii_and_escapes_the_name():
    drawing = svg(one_f_one_b(p=2, m=3), name="a < b")
    assert drawing.isascii()
    assert "a &lt; b" in drawing


def test_svg_of_a_forward_only_program_has_no_backward():
    assert "backward" not in svg(forward_only(p=2, m=3))


@pytest.mark.parametrize("draw", [text, svg])
@pytest.mark.parametrize("nothing", [(), ((), ()), []])
def test_nothing_is_not_drawn(draw, nothing):
    with pytest.raises(ValueError, match="got no forward"):
        draw(nothing)
