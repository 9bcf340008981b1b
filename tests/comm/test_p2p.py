import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.comm.p2p import Messenger
from tests.spmd import spmd

CPU = torch.device("cpu")
KEY = ("activations", "shapes")


def messenger():
    return Messenger(dist.group.WORLD, CPU)


@spmd(world_size=2)
def test_tensors_and_their_structure_arrive():
    wire, sent = messenger(), (torch.arange(6.0).view(2, 3).t(), torch.tensor([7, 8]))
    if dist.get_rank() == 0:
        wire.send(sent, 1, KEY, extra={"structure": 1})
        wire.flush()
    else:
        arriving = wire.receive(0, KEY)
        first, second = arriving.wait()
        assert arriving.envelope.extra == {"structure": 1}
        assert torch.equal(first, sent[0]), "a transposed tensor arrives as what it shows"
        assert torch.equal(second, sent[1])


@spmd(world_size=2)
def test_messages_arrive_in_the_order_in_which_they_were_sent():
    wire = messenger()
    if dist.get_rank() == 0:
        for value in range(4):
            wire.send((torch.full((2,), float(value)),), 1, KEY)
        wire.flush()
    else:
        arriving = [wire.receive(0, KEY) for _ in range(4)]
        assert [a.wait()[0].tolist() for a in reversed(arriving)] == [[v, v] for v in (3.0, 2.0, 1.0, 0.0)]


@spmd(world_size=2)
def test_envelope_goes_ahead_once_for_each_key():
    wire = messenger()
    for shapes, length in (("a", 2), ("a", 2), ("b", 3), ("a", 2)):
        key = ("activations", shapes)
        if dist.get_rank() == 0:
            wire.send((torch.ones(length),), 1, key)
            wire.flush()
        else:
            assert wire.receive(0, key).wait()[0].tolist() == [1.0] * length
    assert len(wire._sent if dist.get_rank() == 0 else wire._received) == 2


@spmd(world_size=2)
def test_other_shapes_under_the_same_key_are_refused():
    wire = messenger()
    if dist.get_rank() == 0:
        wire.send((torch.ones(2),), 1, KEY)
        with pytest.raises(
            RuntimeError, match=r"shapes \(\(\(3,\), torch.float32\),\) leave this stage where.*pad them"
        ):
            wire.send((torch.ones(3),), 1, KEY)
        wire.flush()
    else:
        wire.receive(0, KEY).wait()
