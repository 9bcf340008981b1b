"""A job of four processes (t = 2, p = 2) that saves every step, of which rank 3 is killed while it writes step 2."""

import os
import signal
import warnings

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.checkpoint.checked_files import Summing
from tests.hygiene import seed_everything
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.trainer.test_layouts import PLAN

BATCHES = [texts(4, seed=i) for i in range(4)]


def trainer_that_saves_each_step(folder, callbacks=(), **arguments):
    return quiet_trainer(
        PTDPStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=1, tensor_parallel_plan=PLAN),
        callbacks=[
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True),
            *callbacks,
        ],
        precision="64-true",
        use_distributed_sampler=False,
        enable_checkpointing=True,
        **arguments,
    )


def job(folder, **arguments):
    """Train and save; the second save kills rank 3 in the middle of its file."""
    warnings.simplefilter("ignore")
    seed_everything()
    trainer = trainer_that_saves_each_step(folder, **arguments)
    write = Summing.write

    def write_or_die(stream, data):
        if trainer.global_rank == 3 and trainer.global_step == 2:
            stream._stream.write(data[: len(data) // 2])
            stream._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(stream, data)

    Summing.write = write_or_die
    trainer.fit(GPT(), datamodule=ReplicaBatches(BATCHES))
