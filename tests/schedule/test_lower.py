from itertools import pairwise

import pytest

from lightning_ptdp.schedule import (
    check,
    compute_only,
    gpipe,
    interleaved,
    lower,
    max_live,
    one_f_one_b,
    parse,
    show,
)

from .grid import ALL, cases


def test_lowered_one_f_one_b_is_this_table():
    assert show(lower(one_f_one_b(p=2, m=2))) == [
        "0F0 0SA0 0F1 0SA1 0RG0 0B0 0RG1 0B1",
        "1RA0 1RA1 1F0 1B0 1SG0 1F1 1B1 1SG1",
    ]


def test_lowered_interleaved_is_this_table():
    assert show(lower(interleaved(p=2, m=2, v=2))) == [
        "0F0 0SA0 0F1 0SA1 2RA0 2F0 2SA0 2RA1 2F1 2SA1 2RG0 2B0 2SG0 2RG1 2B1 2SG1 0RG0 0B0 0RG1 0B1",
        "1RA0 1RA1 1F0 1SA0 3RA0 1F1 1SA1 3RA1 3F0 3B0 3SG0 3F1 1RG0 3B1 3SG1 1RG1 1B0 1SG0 1B1 1SG1",
    ]


def test_receives_stand_where_the_sender_sends_and_not_at_their_consumers():
    """Rank 1 posts both receives before its first forward, as rank 0 has sent both by the time that one ends."""
    assert show(lower(one_f_one_b(p=2, m=2)))[1].startswith("1RA0 1RA1 1F0")


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("schedule", ALL)
def test_every_lowered_program_holds(schedule, p):
    for m, v, program in cases(schedule, p):
        lowered = lower(program)
        check(lowered, max_live=[max_live(schedule, p=p, m=m, v=v, rank=rank) for rank in range(p)])
        assert compute_only(lowered) == program, (m, v)


def test_every_send_directly_follows_its_compute():
    for steps in show(lower(interleaved(p=4, m=7, v=2))):
        words = steps.split()
        for before, word in pairwise(words):
            if "S" in word:
                assert before == word.replace("SA", "F").replace("SG", "B")


def test_a_single_rank_has_no_messages():
    for program in (gpipe(p=1, m=2, v=3), interleaved(p=1, m=2, v=3)):
        assert lower(program) == program


def test_lowering_twice_is_refused():
    with pytest.raises(ValueError, match="got a lowered program; pass the bare one"):
        lower(lower(one_f_one_b(p=2, m=2)))


def test_a_program_that_deadlocks_by_itself_is_refused():
    with pytest.raises(ValueError, match="deadlock: rank 0 stands at step 0, 2F0, and waits for 1F0"):
        lower(parse(["2F0 0F0", "1F0 3F0"]))
