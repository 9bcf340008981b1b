"""Says what waits for what. A *track* is one op on one stage: the actions 2F0, 2F1, ..., which run in this order.

So an order between actions is an order between tracks: microbatch i of one waits for microbatch i of another.

    stage s-1            stage s             stage s+1
    F  SA -----------> RA  F  SA -----------> RA  F
    B  RG <----------- SG  B  RG <----------- SG  B

Neighbouring stages share a rank only if there is a single rank; then nothing crosses a wire.
"""

from lightning_ptdp.schedule.action import COMPUTE, Action, Op, Program

Track = tuple[Op, int]
"""A track, as (op, stage)."""


def num_stages(program: Program) -> int:
    """Count the stages of the pipeline, p * v; 0 for a program without actions."""
    return max((action.stage for steps in program for action in steps), default=-1) + 1


def compute_only(program: Program) -> Program:
    """Leave the messages out of a program: what `lower` was given."""
    return tuple(tuple(action for action in steps if action.op in COMPUTE) for steps in program)


def has_messages(program: Program) -> bool:
    """Whether the program has been lowered."""
    return any(action.op not in COMPUTE for steps in program for action in steps)


def trains(program: Program) -> bool:
    """Whether the program has backwards; else it is forward-only."""
    return any(action.op is Op.BACKWARD for steps in program for action in steps)


def peer(message: Action) -> Action:
    """The other end of a send or a receive: `0SA3` <-> `1RA3`, `1SG3` <-> `0RG3`."""
    match message.op:
        case Op.SEND_ACTIVATION:
            return Action(Op.RECV_ACTIVATION, message.stage + 1, message.microbatch)
        case Op.RECV_ACTIVATION:
            return Action(Op.SEND_ACTIVATION, message.stage - 1, message.microbatch)
        case Op.SEND_GRADIENT:
            return Action(Op.RECV_GRADIENT, message.stage - 1, message.microbatch)
        case Op.RECV_GRADIENT:
            return Action(Op.SEND_GRADIENT, message.stage + 1, message.microbatch)
    raise ValueError(f"only sends and receives have a peer; got {message}")


def wires(stages: int) -> dict[Track, Track]:
    """For each track of sends the track of receives at its other end."""
    activations: dict[Track, Track] = {(Op.SEND_ACTIVATION, s): (Op.RECV_ACTIVATION, s + 1) for s in range(stages - 1)}
    gradients: dict[Track, Track] = {(Op.SEND_GRADIENT, s + 1): (Op.RECV_GRADIENT, s) for s in range(stages - 1)}
    return activations | gradients


def producers(stages: int) -> dict[Track, Track]:
    """For each track of computes the neighbour stage's track whose results it takes in; the ends have none."""
    forwards: dict[Track, Track] = {(Op.FORWARD, s): (Op.FORWARD, s - 1) for s in range(1, stages)}
    backwards: dict[Track, Track] = {(Op.BACKWARD, s): (Op.BACKWARD, s + 1) for s in range(stages - 1)}
    return forwards | backwards


def compute_needs(stages: int) -> dict[Track, tuple[Track, ...]]:
    """In a bare program: a compute waits for its producer, a backward also for its own forward."""
    feeder = producers(stages)
    needs: dict[Track, tuple[Track, ...]] = {}
    for s in range(stages):
        forward, backward = (Op.FORWARD, s), (Op.BACKWARD, s)
        needs[forward] = (feeder[forward],) if forward in feeder else ()
        needs[backward] = (forward, feeder[backward]) if backward in feeder else (forward,)
    return needs


def message_needs(stages: int) -> dict[Track, tuple[Track, ...]]:
    """In a lowered program: a compute waits for its receive, a send for its compute, and both ends for each other."""
    needs: dict[Track, tuple[Track, ...]] = {(Op.FORWARD, 0): ()}
    needs[Op.BACKWARD, stages - 1] = ((Op.FORWARD, stages - 1),)
    for send, receive in wires(stages).items():
        op = Op.FORWARD if send[0] is Op.SEND_ACTIVATION else Op.BACKWARD
        source, consumer = (op, send[1]), (op, receive[1])
        needs[send] = (source, receive)
        needs[receive] = (send,)
        needs[consumer] = (receive,) if op is Op.FORWARD else ((Op.FORWARD, receive[1]), receive)
    return needs
