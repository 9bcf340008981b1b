"""A signal to one rank stops all after the step, with a checkpoint where that was asked for."""

import os
import signal

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.checkpoint.reading import read_checkpoint
from tests.fits import Net, batches_of
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd


class Signals(pl.Callback):
    """Sends one to a rank, in its second batch."""

    def __init__(self, number, rank):
        self.number, self.rank = number, rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


def trainer_of(folder, strategy, callbacks=(), **trainer):
    return quiet_trainer(
        PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1, **strategy),
        callbacks=[ModelCheckpoint(folder, save_top_k=0), *callbacks],
        enable_checkpointing=True,
        **trainer,
    )


def stop_and_go_on(folder, number, rank, strategy, trainer):
    """The steps done and what is there when a signal came, and the step from which training goes on."""
    handler = signal.getsignal(number)
    stopped = trainer_of(folder, strategy, [Signals(number, rank)], **trainer)
    with pytest.raises(SIGTERMException):
        stopped.fit(Net(), datamodule=ReplicaBatches(BATCHES))
    assert signal.getsignal(number) is handler
    left, again = sorted(os.listdir(folder)), trainer_of(folder, strategy, max_steps=stopped.global_step)
    if left:
        again.fit(Net(), datamodule=ReplicaBatches(BATCHES), ckpt_path="last")
    return stopped.global_step, left, again.global_step


BATCHES = batches_of(*[4] * 5)
ROWS = {
    "SIGTERM to the last rank": (signal.SIGTERM, 1, {"save_on_signal": True}, {}, 2, True),
    "SIGTERM to rank 0, in the background": (
        signal.SIGTERM,
        0,
        {"save_on_signal": True, "async_checkpoint": True},
        {},
        2,
        True,
    ),
    "SIGUSR1": (signal.SIGUSR1, 0, {"save_on_signal": [signal.SIGUSR1]}, {}, 2, True),
    "within a window": (signal.SIGTERM, 1, {"save_on_signal": True}, {"accumulate_grad_batches": 4}, 1, True),
    "nothing is to be saved": (signal.SIGTERM, 1, {}, {}, 2, False),
}


@pytest.mark.parametrize(("number", "rank", "strategy", "trainer", "steps", "saves"), ROWS.values(), ids=ROWS)
def test_signal_to_one_rank_stops_all_after_the_step(number, rank, strategy, trainer, steps, saves, tmp_path):
    left = ["last-signal.ckpt"] if saves else []
    ranks = run_spmd(
        stop_and_go_on,
        world_size=2,
        folder=str(tmp_path),
        number=int(number),
        rank=rank,
        strategy=strategy,
        trainer=trainer,
    )
    assert ranks == [(steps, left, steps if saves else 0)] * 2
    if saves:
        assert read_checkpoint(tmp_path / "last-signal.ckpt")["global_step"] == steps


def refuse():
    with pytest.raises(ValueError, match="save_on_signal must name signals that a process can handle, got"):
        quiet_trainer(PTDPStrategy(save_on_signal=[signal.SIGKILL])).fit(
            Net(), datamodule=ReplicaBatches(batches_of(4))
        )


def test_signals_that_cannot_be_handled_are_refused():
    run_spmd(refuse, world_size=2)
