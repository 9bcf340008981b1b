import pytest

from lightning_ptdp.schedule import (
    Action,
    Op,
    check,
    forward_only,
    generate,
    gpipe,
    interleaved,
    live_activations,
    lower,
    max_live,
    one_f_one_b,
    parse,
    show,
)

from .grid import ALL, cases


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("schedule", ALL)
def test_every_bare_program_holds(schedule, p):
    for m, v, program in cases(schedule, p):
        check(program, max_live=[max_live(schedule, p=p, m=m, v=v, rank=rank) for rank in range(p)])


def test_schedules_run_the_same_work():
    def work(schedule):
        program = generate(schedule, pipeline_parallel_size=4, num_microbatches=6, virtual_pipeline_size=2)
        return [frozenset(steps) for steps in program]

    assert work("gpipe") == work("interleaved")


def edit(program, rank, *, drop=None, swap=None, move=None):
    """The program with actions of one rank dropped, exchanged, or moved to just before another."""
    words = show(program)[rank].split()
    if drop:
        words.remove(drop)
    if swap:
        one, other = map(words.index, swap)
        words[one], words[other] = words[other], words[one]
    if move:
        word, before = move
        words.remove(word)
        words.insert(words.index(before), word)
    lines = show(program)
    return parse([*lines[:rank], " ".join(words), *lines[rank + 1 :]])


BARE = interleaved(p=2, m=4, v=2)
LOWERED = lower(BARE)


@pytest.mark.parametrize("program", [BARE, LOWERED], ids=["bare", "lowered"])
def test_a_dropped_forward_is_found(program):
    with pytest.raises(ValueError, match="rank 1 has 1F3 where 1F2 is due"):
        check(edit(program, 1, drop="1F2"))


@pytest.mark.parametrize("program", [BARE, LOWERED], ids=["bare", "lowered"])
def test_a_dropped_last_backward_is_found(program):
    with pytest.raises(ValueError, match="stage 0 on rank 0 has 3 of m=4 B: 0B3 is missing"):
        check(edit(program, 0, drop="0B3"))


@pytest.mark.parametrize("program", [BARE, LOWERED], ids=["bare", "lowered"])
def test_backwards_out_of_order_are_found(program):
    with pytest.raises(ValueError, match="rank 0 has 2B1 where 2B0 is due"):
        check(edit(program, 0, swap=("2B0", "2B1")))


@pytest.mark.parametrize("program", [BARE, LOWERED], ids=["bare", "lowered"])
def test_a_backward_before_its_forward_is_found(program):
    with pytest.raises(ValueError, match=r"rank 1 stands at step \d+, 3B0, and waits for 3F0"):
        check(edit(program, 1, move=("3B0", "3F0")))


def test_an_action_twice_is_found():
    with pytest.raises(ValueError, match="rank 0 has 0F0 where 0F1 is due"):
        check(parse(["0F0 0F0 0B0"]))


def test_a_stage_on_the_wrong_rank_is_found():
    with pytest.raises(ValueError, match="stage s lies on rank s % p; got F of stage 1 on rank 0, p=2"):
        check(parse(["1F0 1B0", "0F0 0B0"]))


def test_an_uneven_number_of_stages_is_found():
    with pytest.raises(ValueError, match="got 3 stages on p=2 ranks"):
        check(parse(["0F0 2F0", "1F0"]))


def test_an_empty_program_is_refused():
    for program in ((), ((), ())):
        with pytest.raises(ValueError, match="got 0 stages"):
            check(program)


def test_a_forward_that_overtakes_the_stage_before_it_is_found():
    with pytest.raises(ValueError, match="rank 0 stands at step 0, 1F0, and waits for 0F0"):
        check(parse(["1F0 0F0"]))


def test_one_backward_missing_everywhere_but_on_one_stage_is_found():
    with pytest.raises(ValueError, match="stage 0 on rank 0 has 0 of m=1 B: 0B0 is missing"):
        check(parse(["0F0", "1F0 1B0"]))


def test_forward_only_programs_hold():
    check(forward_only(p=2, m=3, v=2))
    check(lower(forward_only(p=2, m=3, v=2)))


def test_receives_just_before_their_consumers_deadlock():
    """The order of the pipelined loop that receives when it needs: 1F1B meets it with both ranks sending."""
    late = [
        "0F0 0SA0 0F1 0SA1 0RG0 0B0 0F2 0SA2 0RG1 0B1 0RG2 0B2",
        "1RA0 1F0 1B0 1SG0 1RA1 1F1 1B1 1SG1 1RA2 1F2 1B2 1SG2",
    ]
    with pytest.raises(
        ValueError,
        match="deadlock: rank 0 stands at step 3, 0SA1, and waits for 1RA1; "
        "rank 1 stands at step 3, 1SG0, and waits for 0RG0; ",
    ):
        check(parse(late))


def just_in_time(program):
    """Messages with each receive directly before its consumer: what `lower` does not do."""
    last = max(action.stage for steps in program for action in steps)

    def around(action):
        forward = action.op is Op.FORWARD
        receive, send = (Op.RECV_ACTIVATION, Op.SEND_ACTIVATION) if forward else (Op.RECV_GRADIENT, Op.SEND_GRADIENT)
        begins, ends = (0, last) if forward else (last, 0)
        at = (action.stage, action.microbatch)
        return (
            *([Action(receive, *at)] if action.stage != begins else []),
            action,
            *([Action(send, *at)] if action.stage != ends else []),
        )

    return tuple(tuple(word for action in steps for word in around(action)) for steps in program)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_just_in_time_receives_break_every_interleaved_program(p, v):
    for m in (p, 2 * p, 3 * p, 4 * p):
        with pytest.raises(ValueError, match=r"deadlock|arrive in the order"):
            check(just_in_time(interleaved(p=p, m=m, v=v)))


def test_crossed_messages_are_found():
    """At p=2 one wire carries activations to the next stage and gradients to the one before: the order is all."""
    with pytest.raises(ValueError, match="message 4 from rank 0 to rank 1 is sent as 0SA2 and received as 1RG0"):
        check(edit(LOWERED, 1, swap=("1RA2", "1RG0")))


@pytest.mark.parametrize(("rank", "word", "missing"), [(0, "0SA3", "0SA3"), (1, "1RA3", "1RA3"), (1, "1SG3", "1SG3")])
def test_a_dropped_message_is_found(rank, word, missing):
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        check(edit(LOWERED, rank, drop=word))


def test_a_send_before_its_compute_is_found():
    with pytest.raises(ValueError, match="rank 0 stands at step 0, 0SA0, and waits for 0F0"):
        check(edit(LOWERED, 0, move=("0SA0", "0F0")))


def test_a_compute_before_its_receive_is_found():
    with pytest.raises(ValueError, match="rank 1 stands at step 0, 1F0, and waits for 1RA0"):
        check(edit(LOWERED, 1, move=("1F0", "1RA0")))


@pytest.mark.parametrize("lines", [["0F0", "1F0 1SA0"], ["0F0 0RA0", "1F0"], ["0F0 0SA0 1RA0 1F0"]])
def test_a_message_without_another_end_is_found(lines):
    with pytest.raises(ValueError, match="which has no other end among 2 stages"):
        check(parse(lines))


def test_too_many_live_activations_are_found():
    with pytest.raises(ValueError, match="rank 1 holds 4 stage inputs after step 3, 1F3; its bound is 3"):
        check(gpipe(p=2, m=4), max_live=[4, 3])


def test_a_bound_for_each_rank_is_required():
    with pytest.raises(ValueError, match="one bound a rank; got 1 bounds for 2 ranks"):
        check(gpipe(p=2, m=4), max_live=[4])


def test_live_activations_are_these_numbers():
    assert live_activations(gpipe(p=2, m=3)) == [3, 3]
    assert live_activations(one_f_one_b(p=4, m=8)) == [4, 3, 2, 1]
    assert live_activations(LOWERED) == [5, 3]
    assert live_activations(forward_only(p=2, m=3)) == [0, 0]
