import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.comm.failure import FailureBoard
from lightning_ptdp.topology import Topology
from tests.spmd import SpmdError, run_spmd, spmd


def board(**options):
    topology = Topology(pipeline_parallel_size=dist.get_world_size())
    return FailureBoard(topology, dist.get_rank(), "127.0.0.1", dist.group.WORLD, **options)


def notes(error):
    return getattr(error, "__notes__", [])


def report_in_turn(texts):
    """Ranks report errors of these texts, rank 0 last; returns the notes that this rank's error has then."""
    mine = RuntimeError(texts[dist.get_rank()])
    with board() as open_board:
        for rank in reversed(range(dist.get_world_size())):
            if rank == dist.get_rank():
                open_board.report(mine)
            dist.barrier()
    return notes(mine)


def test_first_cause_wins_and_names_its_rank():
    assert run_spmd(report_in_turn, texts=["late", "first"]) == [
        ["first failure: rank 1 (pipeline rank 0, replica 0, tensor rank 0): RuntimeError: first"],
        ["raised on rank 1 (pipeline rank 0, replica 0, tensor rank 0)"],
    ]


def test_closed_connection_is_told_its_cause():
    (note,), _ = run_spmd(report_in_turn, texts=["Connection closed by peer [127.0.0.1]", "bad sample 17"])
    assert note.endswith("RuntimeError: bad sample 17")


def test_error_that_all_ranks_raise_is_not_its_own_cause():
    *late, first = run_spmd(report_in_turn, texts=["same"] * 3, world_size=3)
    assert late == [[], []]
    assert first == ["raised on rank 2 (pipeline rank 0, replica 0, tensor rank 0)"]


def test_consequence_without_a_cause_says_so():
    (note,) = run_spmd(lonely_consequence)[0]
    assert "no rank posted a cause: was a process killed, by want of memory perhaps?" in note


def lonely_consequence():
    error = dist.DistBackendError("gone")
    with patch("lightning_ptdp.comm.failure._WAIT_FOR_CAUSE_S", 0.1), board() as open_board:
        if dist.get_rank() == 0:
            open_board.report(error)
        dist.barrier()
        if dist.get_rank() == 1:
            open_board.report(ValueError("late"))  # and reads, so that rank 0 need not wait
    return notes(error)


@spmd(world_size=2)
def test_notes_of_an_error_are_part_of_the_cause():
    mine = ValueError("bad sample 17")
    mine.add_note("stage 1, microbatch 3")
    late = ValueError("late")
    with board() as open_board:
        if dist.get_rank() == 1:
            open_board.report(mine)
        dist.barrier()
        if dist.get_rank() == 0:
            open_board.report(late)
            assert notes(late)[0].endswith("ValueError: bad sample 17; stage 1, microbatch 3")
        dist.barrier()


@spmd(world_size=2)
def test_error_is_reported_once():
    late = ValueError("late")
    with board() as open_board:
        if dist.get_rank() == 1:
            open_board.report(ValueError("first"))
        dist.barrier()
        open_board.report(late)
        open_board.report(late)
        assert len(notes(late)) == 1
        dist.barrier()


@spmd(world_size=2)
def test_refusal_on_every_rank_ends_at_once():
    """Before the watcher runs, as at set-up."""
    start, open_board = time.monotonic(), board()
    open_board.report(ValueError("the same on every rank"))
    open_board.__exit__()
    dist.barrier()
    assert time.monotonic() - start < 3.0


@spmd(world_size=2)
def test_run_after_a_failed_one_starts_with_an_empty_board():
    """Otherwise its watcher would end the process for the old failure."""
    open_board = board()
    for text in ("first run", "second run"):
        late = ValueError(f"late in the {text}")
        with open_board:
            dist.barrier()
            if dist.get_rank() == 1:
                open_board.report(ValueError(text))
            dist.barrier()
            if dist.get_rank() == 0:
                open_board.report(late)
                assert notes(late)[0].endswith(f"ValueError: {text}")
            dist.barrier()


@spmd(world_size=1)
def test_lone_process_has_no_board():
    error = ValueError("mine")
    with board() as open_board:
        open_board.report(error)
    assert notes(error) == []


def stay_blocked():
    with board(grace_s=0.1) as open_board:
        if dist.get_rank() == 1:
            open_board.report(ValueError("bad sample 17"))
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def test_rank_that_stays_blocked_is_ended_with_the_cause(capsys):
    with pytest.raises(SpmdError, match="the process died with exit code 1"):
        run_spmd(stay_blocked)
    assert (
        "was still blocked 0 s after a failure elsewhere, and ends.\nfirst failure: rank 1" in capsys.readouterr().out
    )
