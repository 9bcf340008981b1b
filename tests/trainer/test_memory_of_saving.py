"""One ordinary file is gathered piece by piece: rank 0 never holds the whole model."""

import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_ptdp import PTDPStrategy
from tests.oracle import ReplicaBatches, quiet_trainer
from tests.spmd import run_spmd

MIB = 1 << 20
SIZE, NUM_LAYERS = 4096, 6  # 64 MiB a layer, which malloc gives back to the system at once
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Wide(pl.LightningModule):
    """Large matrices, and nothing else."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(NUM_LAYERS))

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def resident(peak):
    """Bytes of this process in memory, now or at most since `CLEAR` was written to."""
    field = "VmHWM" if peak else "VmRSS"
    return int(re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())[1]) * 1024


def growth_while_saving(path):
    trainer = quiet_trainer(PTDPStrategy(pipeline_parallel_size=2, save_distributed_checkpoint=False), max_steps=1)
    trainer.fit(Wide(), datamodule=ReplicaBatches([{"x": torch.ones(1, SIZE)}]))
    trainer.save_checkpoint(path)  # what is loaded or allocated once is not counted below
    CLEAR.write_text("5")
    before = resident(peak=False)
    trainer.save_checkpoint(path)
    return resident(peak=True) - before


@pytest.mark.skipif(not CLEAR.exists(), reason="peaks of memory are reset through /proc, which Linux has")
def test_rank_0_holds_one_tensor_more_than_its_share(tmp_path):
    path = tmp_path / "whole.ckpt"
    growth = run_spmd(growth_while_saving, world_size=2, timeout=60, path=str(path))
    assert path.stat().st_size > NUM_LAYERS * SIZE * SIZE * 4
    assert max(growth) < 1.1 * SIZE * SIZE * 4, [f"{each / MIB:.0f} MiB" for each in growth]
