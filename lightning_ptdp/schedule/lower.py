"""Adds the messages between pipeline ranks to a program of forwards and backwards."""

from lightning_ptdp.schedule.action import Action, Op, Program
from lightning_ptdp.schedule.timing import timeline
from lightning_ptdp.schedule.tracks import has_messages, num_stages, peer

_COST = {Op.FORWARD: 1, Op.BACKWARD: 2}


def lower(program: Program) -> Program:
    """Put each send right after its compute, and each receive where the receiver stands when the sender sends.

    Where that is, a run on a clock says (forward 1, backward 2, messages 0): all computes are taken in the order in
    which they end, and with each one its send is written on its own rank and the receive on the neighbour's.

    No rank can then wait for ever, even if every send and every receive blocks until the other side has started:
    the order of writing is one order of all messages which both ends of each follow, so the first message not yet
    done is always next on both its ranks (computes before it take in earlier messages only). It also makes messages
    between two ranks arrive in the order in which they are sent, which a wire without tags needs. Receives placed
    just before their consumers have neither property.

    A single rank has no messages, whatever its number of stages.

    Raises:
        ValueError: the program deadlocks by itself, or already has messages.
    """
    if has_messages(program):
        raise ValueError("lower adds messages to a program without any; got a lowered program; pass the bare one")
    stages, p = num_stages(program), len(program)
    steps: list[list[Action]] = [[] for _ in program]
    spans = timeline(program, cost=lambda action: _COST[action.op], hop=lambda _: 0)
    for span in sorted(spans, key=lambda span: (span.end, span.rank)):
        steps[span.rank].append(span.action)
        send = _send_after(span.action, stages) if p > 1 else None
        if send is not None:
            receive = peer(send)
            steps[span.rank].append(send)
            steps[receive.stage % p].append(receive)
    return tuple(map(tuple, steps))


def _send_after(compute: Action, stages: int) -> Action | None:
    """The send of a compute's result; None where the pipeline ends."""
    if compute.op is Op.FORWARD:
        is_end, op = compute.stage == stages - 1, Op.SEND_ACTIVATION
    else:
        is_end, op = compute.stage == 0, Op.SEND_GRADIENT
    return None if is_end else Action(op, compute.stage, compute.microbatch)
