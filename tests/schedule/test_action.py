import pickle

import pytest

from lightning_ptdp.schedule import Action, Op, interleaved, lower, parse, show


def test_action_prints_as_stage_op_microbatch():
    assert str(Action(Op.FORWARD, 2, 0)) == "2F0"
    assert str(Action(Op.SEND_GRADIENT, 10, 31)) == "10SG31"


def test_parse_reads_every_op():
    assert parse(["0F0 1B2 2SA3 3RA4", "4SG5 5RG6"]) == (
        (
            Action(Op.FORWARD, 0, 0),
            Action(Op.BACKWARD, 1, 2),
            Action(Op.SEND_ACTIVATION, 2, 3),
            Action(Op.RECV_ACTIVATION, 3, 4),
        ),
        (Action(Op.SEND_GRADIENT, 4, 5), Action(Op.RECV_GRADIENT, 5, 6)),
    )


def test_text_form_round_trips():
    for program in (interleaved(p=4, m=12, v=3), lower(interleaved(p=4, m=12, v=3))):
        assert parse(show(program)) == program


def test_idle_rank_round_trips():
    assert show(parse(["0F0", ""])) == ["0F0", ""]


@pytest.mark.parametrize("word", ["F0", "0F", "0X0", "0f0", "-1F0", "0F0,", "0 F0"])
def test_parse_refuses_what_is_no_action(word):
    with pytest.raises(ValueError, match=r"as in 2F0; got .* on the line of rank 1; ops are F, B, SA, RA, SG, RG"):
        parse(["0F0", word])


def test_programs_are_values():
    program = interleaved(p=2, m=4, v=2)
    assert hash(program) == hash(parse(show(program)))
    assert pickle.loads(pickle.dumps(program)) == program
