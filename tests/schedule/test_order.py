import pytest

from lightning_ptdp.schedule import Op, interleaved, lower, parse
from lightning_ptdp.schedule.order import execution_order, track_lengths
from lightning_ptdp.schedule.tracks import compute_needs, message_needs


def test_every_action_comes_once_and_after_what_it_needs():
    needs = compute_needs(stages=4)
    seen = set()
    for rank, action in execution_order(interleaved(p=2, m=3, v=2), needs):
        assert rank == action.stage % 2
        assert all((op, stage, action.microbatch) in seen for op, stage in needs[action.op, action.stage])
        seen.add((action.op, action.stage, action.microbatch))
    assert len(seen) == 2 * 4 * 3


def test_a_message_blocks_both_ends():
    """Two ranks that both send first wait for each other, though each has a receive next."""
    program = parse(["0F0 0SA0 0RG0", "1F0 1SG0 1RA0"])
    needs = message_needs(stages=2) | {(Op.FORWARD, 1): (), (Op.SEND_GRADIENT, 1): ((Op.RECV_GRADIENT, 0),)}
    with pytest.raises(ValueError, match=r"rank 0 stands at step 1, 0SA0, .* rank 1 stands at step 1, 1SG0, "):
        list(execution_order(program, needs))


def test_a_deadlock_tells_which_ranks_have_finished():
    with pytest.raises(ValueError, match="rank 0 has finished; rank 1 stands at step 0, 1B0, and waits for 1F0"):
        list(execution_order(parse(["0F0", "1B0 1F0"]), compute_needs(stages=2)))


def test_lengths_count_each_track():
    assert track_lengths(lower(parse(["0F0 0F1", "1F0 1F1"]))) == {("F", 0): 2, ("SA", 0): 2, ("RA", 1): 2, ("F", 1): 2}


def test_a_track_out_of_order_is_refused():
    with pytest.raises(ValueError, match=r"in this order, each once; rank 0 has 0F2 where 0F1 is due"):
        track_lengths(parse(["0F0 0F2 0F1"]))
