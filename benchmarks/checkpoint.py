"""MB/s of saving and loading a checkpoint folder, against the disk's own rate in the same run, and peak memory.

    python benchmarks/checkpoint.py --mib 1024 --ranks 4 --rounds 5 --folder /path/on/the/disk

In every round all ranks together write and sync plain files of as many bytes, and save; in odd rounds the plain files
come last. Then, in as many rounds, they drop the files from the page cache, read the plain files, and load. Files of
the round before are deleted outside of what is timed. What to read is the ratio, the median over the rounds of
checkpoint / plain. The model is a pipeline of square matrices under SGD, so the checkpoint has the
bytes of its weights. With --background a save is timed until training would go on.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_ptdp import PTDPStrategy

MIB = 1 << 20
_BLOCK = 16 * MIB


class Matrices(L.LightningModule):
    """As many as make up the size."""

    def __init__(self, mib: int, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, size, size, bias=False) for _ in range(max(4, mib * MIB // (4 * size * size)))
        )
        for block in self.blocks:
            nn.init.constant_(block.weight, 1 / size)

    def training_step(self, batch: Any, _: int) -> Any:
        """Anything with a gradient."""
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def train_dataloader(self) -> Any:
        """One row."""
        return torch.utils.data.DataLoader(torch.ones(1, self.blocks[0].weight.shape[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Without states."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Measures(L.Callback):
    """Does the rounds when training ends, on every rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, and print on rank 0."""
        strategy: Any = trainer.strategy
        folder = Path(self.options.folder, "checkpoint-benchmark")
        path, plain = folder / "model.ckpt", folder / f"plain-{trainer.global_rank}"
        if trainer.is_global_zero:
            folder.mkdir(parents=True)
        strategy.barrier()
        mine = sum(p.numel() * p.element_size() for p in pl_module.parameters())
        data = memoryview(torch.rand(_BLOCK // 4).numpy().view("uint8"))

        def write() -> None:
            with plain.open("wb", buffering=0) as file:
                for start in range(0, mine, _BLOCK):
                    file.write(data[: min(_BLOCK, mine - start)])
                os.fsync(file.fileno())

        def save() -> None:
            trainer.save_checkpoint(path)

        def read() -> None:
            with plain.open("rb", buffering=0) as file:
                while file.read(_BLOCK):
                    pass

        def timed(act: Callable[[], Any]) -> float:
            if act is write:
                plain.unlink(missing_ok=True)
            elif act is save and trainer.is_global_zero:
                shutil.rmtree(path, ignore_errors=True)
            strategy.barrier()
            start = time.perf_counter()
            act()
            strategy.barrier()
            took = time.perf_counter() - start
            strategy.checkpoints.wait()  # for a save in the background
            return took

        acts: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "save": (save, write),
            "load": (lambda: strategy.load_checkpoint(path), read),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
        growth = dict.fromkeys(acts, 0)
        for name, (ours, its) in acts.items():
            for i in range(self.options.rounds + 1):  # the first warms up
                if name == "load":
                    _forget([plain, *(path.iterdir() if trainer.is_global_zero else ())])
                first = timed(its) if i % 2 == 0 else 0.0
                before = _resident("VmRSS", reset=True)
                mine_s = timed(ours)
                growth[name] = max(growth[name], _resident("VmHWM") - before) if i else 0
                if i:
                    seconds[name].append((mine_s, first or timed(its)))
                elif not first:
                    timed(its)
        total = int(strategy.reduce(torch.tensor(float(mine)), strategy.groups.world, "sum"))
        peaks = {
            name: int(strategy.reduce(torch.tensor(float(most)), strategy.groups.world, "max"))
            for name, most in growth.items()
        }
        if trainer.is_global_zero:
            shutil.rmtree(folder)
            print(
                f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {total / 1e6:.0f} MB on "
                f"{trainer.world_size} ranks, {mine / 1e6:.0f} MB on rank 0, {self.options.rounds} rounds"
            )
            for name, pairs in seconds.items():
                peak = f"most memory beside the model on a rank: {peaks[name] / 1e6:.0f} MB"
                print(f"{name}: {_figures(pairs, total)}; {peak}")


def _figures(pairs: list[tuple[float, float]], total: int) -> str:
    """pairs: seconds of ours and of plain files. total: bytes."""
    rates = [statistics.median(total / 1e6 / each[i] for each in pairs) for i in (0, 1)]
    ratio = statistics.median(plain_s / ours_s for ours_s, plain_s in pairs)
    return f"{rates[0]:.0f} MB/s, the disk {rates[1]:.0f} MB/s, ratio {ratio:.2f}"


def _forget(files: list[Path]) -> None:
    """Drop files that are synced from the page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _resident(field: str, *, reset: bool = False) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most since the last reset (VmHWM)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    """Start the ranks, by Lightning's launcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model (default 1024)")
    parser.add_argument("--matrix", type=int, default=2048, help="rows of its matrices (default 2048)")
    parser.add_argument("--ranks", type=int, default=4, help="stages of the pipeline (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--folder", default=".", help="where to write, on the disk to measure (default .)")
    parser.add_argument("--background", action="store_true", help="save with async_checkpoint=True")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    trainer = L.Trainer(
        strategy=PTDPStrategy(pipeline_parallel_size=options.ranks, async_checkpoint=options.background),
        accelerator="cpu",
        devices=options.ranks,
        max_steps=1,
        callbacks=[Measures(options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Matrices(options.mib, options.matrix))


if __name__ == "__main__":
    sys.exit(main())
