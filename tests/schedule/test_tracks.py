import pytest

from lightning_ptdp.schedule import Action, Op, compute_only, num_stages, one_f_one_b, parse, peer


@pytest.mark.parametrize(("send", "receive"), [("0SA3", "1RA3"), ("1SG3", "0RG3")])
def test_peers_are_the_two_ends_of_a_message(send, receive):
    ((sent, received),) = parse([f"{send} {receive}"])
    assert peer(sent) == received
    assert peer(received) == sent


def test_a_compute_has_no_peer():
    with pytest.raises(ValueError, match="only sends and receives have a peer; got 0F0"):
        peer(Action(Op.FORWARD, 0, 0))


def test_stages_are_counted_from_the_program():
    assert num_stages(one_f_one_b(p=3, m=1)) == 3
    assert num_stages(((), ())) == 0


def test_compute_only_leaves_out_messages():
    assert compute_only(parse(["0F0 0SA0", "1RA0 1F0"])) == parse(["0F0", "1F0"])
