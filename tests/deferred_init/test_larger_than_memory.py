"""A model that this machine's memory would not hold whole is built by its ranks, one after the other."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ptdp.comm.in_process import InProcessWorld
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.deferred_init import DeferredInit
from lightning_ptdp.engine.engine import assemble
from lightning_ptdp.layout import lay_out
from tests.spmd import run_spmd

HIDDEN = 4096
MATRIX = HIDDEN * HIDDEN * 4  # bytes
MATRICES = 8  # a block


class Big(nn.Module):
    """As many blocks as there are ranks."""

    def __init__(self, num_blocks):
        super().__init__()
        self.num_blocks = num_blocks

    def configure_model(self):
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(MATRICES)))
            for _ in range(self.num_blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def memory(file, name):
    """A figure of /proc, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc", file).read_text().splitlines())
    return int(fields[name].split()[0]) << 10


def peaks_of_some_ranks():
    """Bytes that all weights need, what the first, a middle and the last rank of the pipeline took, and had free."""
    free = memory("meminfo", "MemAvailable")
    num_blocks = free // (MATRICES * MATRIX) + 2
    config = ParallelConfig(pipeline_parallel_size=num_blocks, init="by_operation")
    topology, faults = config.resolve(num_blocks)
    assert not faults
    chosen = (0, num_blocks // 2, num_blocks - 1)

    def build(groups):
        if groups.rank not in chosen:
            return None
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory("self/status", "VmRSS")
        module = Big(num_blocks)
        deferred = DeferredInit(module, seed=1)
        with deferred.recording():
            module.configure_model()
        whole = sum(p.numel() * p.element_size() for p in module.parameters())
        layout, faults = lay_out(module, config, topology)
        assert not faults
        engine = assemble(module, layout, config, groups, torch.device("cpu"), seed=1, deferred=deferred)
        mine = {name: p for p, name in engine.parameters.names.items()}
        assert list(mine) == [f"blocks.{groups.at.pipeline}.{k}.weight" for k in range(MATRICES)]
        for weight in mine.values():  # of nn.Linear's own initialisation, in every corner
            assert 0.9 * HIDDEN**-0.5 < weight[-64:, -64:].abs().max() <= HIDDEN**-0.5
        return whole, memory("self/status", "VmHWM") - before

    return free, [found for found in InProcessWorld(topology).run(build) if found is not None]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read off Linux's /proc")
def test_a_rank_of_a_model_larger_than_memory_takes_its_part_and_a_matrix():
    ((free, found),) = run_spmd(peaks_of_some_ranks, world_size=1, timeout=180)
    assert len(found) == 3
    for whole, peak in found:
        assert whole > free
        assert MATRICES * MATRIX < peak < (MATRICES + 1) * MATRIX + (32 << 20)
