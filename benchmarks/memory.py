"""What layouts keep and send, beside the formulas of the paper (SC'21) and of arXiv 2205.05198.

    python benchmarks/memory.py [--only kept] [--csv memory.csv]

kept: bytes of activations that a layer of the GPT recipe leaves for backward, for one microbatch, in units of s b h;
each storage once, without parameters. sent: elements of a rank, for one microbatch (to replicas: for one batch), a
collective counted as its ring. peak: resident memory of the largest rank of a model that its blocks dominate.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import lightning.pytorch as pl
import torch

from benchmarks.accounts import Accounts, Model, Sizes, activation_bytes, pipeline_elements, tensor_elements
from lightning_ptdp import PTDPStrategy


@dataclass(frozen=True)
class Job:
    """A run of microbatches of one row."""

    sizes: Sizes = field(default_factory=lambda: Sizes(hidden=256, heads=8, length=256, vocabulary=512))
    precision: str = "32-true"
    devices: int = 1
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
    parser.add_argument("--as", dest="job", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        compete(Job(**(given := json.loads(options.job)) | {"sizes": Sizes(**given["sizes"])}), options.out)
        return
    names = [options.only] if options.only else list(TABLES)
    show({name: list(TABLES[name]()) for name in names}, options.csv)


def compete(job: Job, out: Path) -> None:
    """Train two batches, and leave this rank's account."""
    warnings.simplefilter("ignore")
    pl.seed_everything(1, verbose=False)
    accounts = Accounts()
    trainer = pl.Trainer(
        strategy=PTDPStrategy(micro_batch_size=1, **job.strategy),
        accelerator="cpu",
        devices=job.devices,
        precision=job.precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[accounts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(job.sizes))
    torch.save(accounts.account, out / f"{trainer.global_rank}.pt")


def run(job: Job) -> list[Any]:
    """The accounts of all ranks, each a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--as", json.dumps(asdict(job)), "--out", folder]
        ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
        if ended.returncode:
            raise SystemExit(ended.stderr.decode()[-3000:])
        return [torch.load(path, weights_only=False) for path in sorted(Path(folder).iterdir())]


def kept() -> Iterator[Row]:
    for t, sequence_parallel in ((1, False), (2, False), (2, True)):
        for precision in ("bf16-true", "bf16-mixed"):
            for dropout in (0.0, 0.1):
                sizes = Sizes(hidden=256, heads=8, length=256, vocabulary=512, dropout=dropout)
                strategy = {"tensor_parallel_size": t, "sequence_parallel": sequence_parallel}
                found = max(account.activations for account in run(Job(sizes, precision, t, strategy)))
                unit = sizes.length * sizes.hidden
                bounds = [
                    float(activation_bytes(sizes, 1, t=t, sequence_parallel=sequence_parallel, scores=scores) / unit)
                    for scores in (True, False)
                ]
                parts = ", sequence parallel" if sequence_parallel else ""
                yield Row(
                    f"t = {t}{parts}, {precision}, dropout {dropout}",
                    f"{found / unit:.2f} s b h",
                    f"{bounds[0]:.1f} s b h with scores, {bounds[1]:.1f} without",
                )


def sent() -> Iterator[Row]:
    sizes = Job().sizes
    for scatter_gather, parts in ((True, 2), (False, 1)):
        strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "scatter_gather": scatter_gather}
        found = max(account.elements("pipeline", "send") for account in run(Job(devices=4, strategy=strategy)))
        yield Row(
            f"to the next stage, t = 2, p = 2, scatter_gather={scatter_gather}",
            f"{found / sizes.batch}",
            f"b s h / {parts} = {pipeline_elements(sizes, 1, parts=parts)}",
        )
    for sequence_parallel in (False, True):
        strategy = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
        few, many = (run(Job(Sizes(**asdict(sizes) | {"layers": n}), devices=2, strategy=strategy))[0] for n in (2, 4))
        kinds = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
        found = many.elements("tensor", *kinds) - few.elements("tensor", *kinds)
        factor = 10 if sequence_parallel else 8
        yield Row(
            f"to tensor peers, a layer, t = 2{', sequence parallel' if sequence_parallel else ''}",
            f"{found / (2 * sizes.batch)}",
            f"{factor} b s h (t-1)/t = {tensor_elements(sizes, 1, 2) * factor / 8}",
        )
    for shards in (False, True):
        account = run(Job(devices=2, strategy={"distributed_optimizer": shards}))[0]
        kinds = ("reduce_scatter", "all_gather") if shards else ("all_reduce",)
        elements, tensors = account.parameters
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
    job = Job(sizes, devices=p, strategy={"pipeline_parallel_size": p})
    return max(account.peak_bytes for account in run(job))


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
