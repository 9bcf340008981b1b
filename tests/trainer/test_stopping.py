"""Training ends where it ends in one process, on all ranks in the same step."""

from functools import partial

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, Timer

from tests.fits import Net, assert_like_one_process, batches_of


class StopsInStep(Net):
    """In code that only the last stage reaches."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == 1:
            self.trainer.should_stop = True
        return loss


class StopsOnOneRank(Callback):
    """place: the hook that stops, on the last rank alone."""

    def __init__(self, place):
        self.place = place

    def stop(self, trainer, hook):
        is_chosen = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if hook == self.place and is_chosen and trainer.global_step >= 2:
            trainer.should_stop = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.stop(trainer, "batch")

    def on_train_epoch_end(self, trainer, pl_module):
        self.stop(trainer, "epoch")


ROWS = {
    "a step asks": ("p2v2", StopsInStep, {"max_epochs": 2}, ()),
    "a step asks, replicas": ("p2d2", StopsInStep, {"max_epochs": 2}, ()),
    "a step asks too early": ("p2", StopsInStep, {"max_epochs": 3, "min_epochs": 2}, ()),
    "a step asks before min_steps": ("p2", StopsInStep, {"max_epochs": 3, "min_steps": 4}, ()),
    "a rank's callback asks": ("t2p2", Net, {"max_epochs": 2}, [partial(StopsOnOneRank, "batch")]),
    "a replica's callback asks": ("d2", Net, {"max_epochs": 3}, [partial(StopsOnOneRank, "epoch")]),
    "out of time": ("p2", Net, {}, [partial(Timer, {"seconds": 0})]),
}


@pytest.mark.parametrize(("layout", "make", "trainer", "callbacks"), ROWS.values(), ids=ROWS)
def test_all_ranks_stop_where_one_process_stops(layout, make, trainer, callbacks):
    _, one = assert_like_one_process(layout, make, batches_of(4, 4, 4), trainer=trainer, callbacks=callbacks)
    assert len(one.losses) < 3 * trainer.get("max_epochs", 1), "it stopped before the end"
