import pytest

from lightning_ptdp.schedule import (
    Action,
    Op,
    Span,
    bubble_share,
    gpipe,
    interleaved,
    lower,
    makespan,
    one_f_one_b,
    parse,
    timeline,
    unit_spans,
)

from .grid import ALL, chunk_counts, microbatch_counts, program


def rows(spans):
    return [f"{span.rank}: {span.action} {span.start:g}-{span.end:g}" for span in spans]


def test_timeline_of_one_f_one_b_is_this_table():
    assert rows(unit_spans(one_f_one_b(p=2, m=2))) == [
        "0: 0F0 0-1",
        "0: 0F1 1-2",
        "0: 0B0 4-6",
        "0: 0B1 7-9",
        "1: 1F0 1-2",
        "1: 1B0 2-4",
        "1: 1F1 4-5",
        "1: 1B1 5-7",
    ]


def test_a_hop_delays_the_neighbour_and_nobody_else():
    spans = unit_spans(one_f_one_b(p=2, m=1), hop=0.5)
    assert rows(spans) == ["0: 0F0 0-1", "0: 0B0 5-7", "1: 1F0 1.5-2.5", "1: 1B0 2.5-4.5"]


def test_stages_on_one_rank_have_no_hop():
    assert rows(unit_spans(gpipe(p=1, m=1, v=2), hop=9.0)) == [
        "0: 0F0 0-0.5",
        "0: 1F0 0.5-1",
        "0: 1B0 1-2",
        "0: 0B0 2-3",
    ]


def test_costs_may_differ_for_each_action():
    costs = {action: 1.0 + action.stage for steps in gpipe(p=2, m=2) for action in steps}
    spans = timeline(gpipe(p=2, m=2), cost=costs.__getitem__, hop=lambda action: 0.25 * (action.op is Op.BACKWARD))
    assert rows(spans) == [
        "0: 0F0 0-1",
        "0: 0F1 1-2",
        "0: 0B0 7.25-8.25",
        "0: 0B1 9.25-10.25",
        "1: 1F0 1-3",
        "1: 1F1 3-5",
        "1: 1B0 5-7",
        "1: 1B1 7-9",
    ]


def test_a_lowered_program_takes_the_time_of_its_bare_one():
    bare = interleaved(p=4, m=6, v=2)
    assert unit_spans(lower(bare), hop=0.1) == unit_spans(bare, hop=0.1)


def test_a_program_that_deadlocks_has_no_timeline():
    with pytest.raises(ValueError, match="deadlock"):
        unit_spans(parse(["1F0 0F0"]))


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_bubble_is_that_of_the_paper(schedule, p):
    """(p-1)/(v m) of the ideal time for m a multiple of p: SC'21 sections 2.2.1 and 2.2.2."""
    for v in chunk_counts(schedule):
        for m in range(p, 4 * p + 1, p):
            assert bubble_share(unit_spans(program(schedule, p, m, v))) == pytest.approx((p - 1) / (v * m), abs=1e-9)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("schedule", ALL)
def test_other_microbatch_counts_take_no_longer_than_the_next_multiple(schedule, p):
    for v in chunk_counts(schedule):
        multiples = [makespan(unit_spans(program(schedule, p, k * p, v))) for k in range(5)[1:]]
        for m in microbatch_counts(p):
            # 1e-9: sums of 1/3 are rounded
            assert makespan(unit_spans(program(schedule, p, m, v))) <= multiples[(m - 1) // p] + 1e-9, (m, v)


def test_bubble_of_measured_spans_counts_from_the_first_start():
    spans = [Span(0, 10.0, 1.0, Action(Op.FORWARD, 0, 0)), Span(1, 11.0, 1.0, Action(Op.FORWARD, 1, 0))]
    assert makespan(spans) == 2.0
    assert bubble_share(spans) == 1.0
