"""What layouts keep and send, beside the formulas of the paper (SC'21) and of arXiv 2205.05198.

    python benchmarks/memory.py [--only kept] [--csv memory.csv]

kept: bytes of activations that a layer of the GPT recipe leaves for backward, for one microbatch, in units of s b h;
each storage once, without parameters. sent: elements of a rank, for one microbatch (to replicas: for one batch), a
collective counted as its ring. peak: resident memory of the largest rank of a model that its blocks dominate.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import lightning.pytorch as pl
import torch

from benchmarks.accounts import Account, Accounts, Model, Sizes, activation_bytes, pipeline_elements, tensor_elements
from lightning_ptdp import PTDPStrategy

ROOT = Path(__file__).resolve().parent.parent
SIZES = Sizes(hidden=256, heads=8, length=256, vocabulary=512)


@dataclass(frozen=True)
class Job:
    """A run of microbatches of one row."""

    sizes: Sizes = SIZES
    precision: str = "32-true"
    strategy: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    what: str
    measured: str
    formula: str


def main() -> None:
    """Referee, or a run with --as."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    parser.add_argument("--csv", type=Path, help="where to write the figures")
    parser.add_argument("--as", dest="jobs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs:
        compete(options.jobs)
        return
    names = [options.only] if options.only else list(TABLES)
    show({name: list(TABLES[name]()) for name in names}, options.csv)


def compete(folder: Path) -> None:
    """Train two batches of each job in a folder, and leave this rank's accounts there."""
    warnings.simplefilter("ignore")
    devices, jobs = torch.load(folder / "jobs", weights_only=False)
    found = []
    for job in jobs:
        pl.seed_everything(1, verbose=False)
        accounts = Accounts()
        trainer = pl.Trainer(
            strategy=PTDPStrategy(micro_batch_size=1, **job.strategy),
            accelerator="cpu",
            devices=devices,
            precision=job.precision,
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[accounts],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(job.sizes))
        found.append(accounts.account)
    torch.save(found, folder / f"rank-{trainer.global_rank}")


def run(devices: int, *jobs: Job) -> list[list[Account]]:
    """The accounts of all ranks for each job; the ranks are processes of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((devices, jobs), folder / "jobs")
        command = [sys.executable, "-m", "benchmarks.memory", "--as", name]
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False
        )
        if ended.returncode:
            raise SystemExit(ended.stderr.decode()[-3000:])
        by_rank = [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank-*"))]
        return [list(accounts) for accounts in zip(*by_rank, strict=True)]


def kept() -> Iterator[Row]:
    cases = list(product(("bf16-true", "bf16-mixed"), (0.0, 0.1)))
    sizes = Job().sizes
    unit = sizes.length * sizes.hidden
    for t, sequence_parallel in ((1, False), (2, False), (2, True)):
        strategy = {"tensor_parallel_size": t, "sequence_parallel": sequence_parallel}
        jobs = [Job(replace(sizes, batch=1, dropout=dropout), precision, strategy) for precision, dropout in cases]
        full, least = (
            activation_bytes(sizes, 1, t=t, sequence_parallel=sequence_parallel, scores=scores) / unit
            for scores in (True, False)
        )
        for (precision, dropout), accounts in zip(cases, run(t, *jobs), strict=True):
            found = max(account.activations for account in accounts)
            yield Row(
                f"t = {t}{', sequence parallel' if sequence_parallel else ''}, {precision}, dropout {dropout}",
                f"{found / unit:.2f} s b h",
                f"{float(full):.1f} s b h with scores, {float(least):.1f} without",
            )


def sent() -> Iterator[Row]:
    job = Job()
    sizes = job.sizes
    cuts = [
        replace(job, strategy={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "scatter_gather": parts > 1})
        for parts in (2, 1)
    ]
    for parts, (account, *_) in zip((2, 1), run(4, *cuts), strict=True):
        yield Row(
            f"to the next stage, t = 2, p = 2, scatter_gather={parts > 1}",
            f"{account.elements('pipeline', 'send') / sizes.batch}",
            f"b s h / {parts} = {pipeline_elements(sizes, 1, parts=parts)}",
        )
    of_layers = [
        replace(
            job,
            sizes=replace(sizes, layers=layers),
            strategy={"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel},
        )
        for sequence_parallel in (False, True)
        for layers in (2, 3)
    ]
    replicas = [replace(job, strategy={"distributed_optimizer": shards}) for shards in (False, True)]
    (few, *_), (many, *_), (few_parts, *_), (many_parts, *_), *of_replicas = run(2, *of_layers, *replicas)
    for name, less, more, kinds, factor in (
        ("", few, many, ("all_reduce",), 8),
        (", sequence parallel", few_parts, many_parts, ("all_gather", "reduce_scatter"), 10),
    ):
        found = more.elements("tensor", *kinds) - less.elements("tensor", *kinds)
        yield Row(
            f"to tensor peers, a layer, t = 2{name}",
            f"{found / sizes.batch}",
            f"{factor} b s h (t-1)/t = {tensor_elements(sizes, 1, 2) * factor / 8}",
        )
    for shards, (account, *_) in zip((False, True), of_replicas, strict=True):
        elements, tensors = account.parameters
        kinds = ("reduce_scatter", "all_gather") if shards else ("all_reduce",)
        yield Row(
            f"to replicas, d = 2{', distributed_optimizer' if shards else ''}",
            f"{account.elements('data', *kinds)}",
            f"2 P (d-1)/d = {elements}" + ("" if shards else f", and a flag for each of {tensors} parameters"),
        )


def peak() -> Iterator[Row]:
    whole, part = peak_bytes(1), peak_bytes(4)
    yield Row("p = 1", f"{whole / 2**20:.0f} MiB", "")
    yield Row(
        "p = 4", f"{part / 2**20:.0f} MiB, {part / whole:.2f} of p = 1", "0.25 and what a process has without a model"
    )


def peak_bytes(p: int) -> int:
    """Resident memory of the largest of p ranks, where 201 M parameters lie in blocks."""
    sizes = Sizes(layers=16, hidden=1024, heads=16, length=8, vocabulary=256, batches=1)
    (accounts,) = run(p, Job(sizes, strategy={"pipeline_parallel_size": p}))
    return max(account.peak_bytes for account in accounts)


TABLES = {"kept": kept, "sent": sent, "peak": peak}


def show(tables: dict[str, list[Row]], path: Path | None) -> None:
    """Print the tables, and write them below a comment with the machine and the versions."""
    from rich.console import Console
    from rich.table import Table

    head = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}; {Job().sizes}"
    for name, rows in tables.items():
        table = Table(name, "measured", "formula", title=head)
        for row in rows:
            table.add_row(row.what, row.measured, row.formula)
        Console(width=160).print(table)
    if path is not None:
        with path.open("w", newline="") as file:
            file.write(f"# {head}\n")
            writer = csv.writer(file)
            writer.writerow(["table", "what", "measured", "formula"])
            writer.writerows(
                [name, row.what, row.measured, row.formula] for name, rows in tables.items() for row in rows
            )


if __name__ == "__main__":
    main()
