"""Step time and tokens a second of layouts, in turns with the plain module in one process.

    python benchmarks/step_time.py t1p2v1d1 t2p1v1d1 t1p1v1d2 --steps 20

A layout is t, p, v, d. The job is the GPT recipe's model on random tokens with AdamW. "plain" is the same module under
Lightning's own single-device strategy, with as many threads as the layouts have ranks (up to the machine's cores). All
take turns step by step in one run; what to read is the ratio, the median of layout / plain over the rounds. --csv
writes the figures to a file, with hardware and versions in its head.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from turns import Contestant, Gate, run


def main() -> None:
    """Referee, or contestant with --as."""
    options = _options()
    if options.contestant:
        compete(options)
        return
    contestants = [_contestant("plain", options)] + [_contestant(layout, options) for layout in options.layouts]
    run(contestants, options.warmup + options.steps, lambda i: print(f"round {i}", file=sys.stderr, flush=True))
    _report(contestants, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=["t1p1v1d2", "t1p2v1d1", "t1p2v2d1", "t2p1v1d1"])
    for name, value, text in (
        ("steps", 20, "timed rounds"),
        ("warmup", 2, "rounds before them"),
        ("layers", 8, "blocks"),
        ("hidden", 256, "hidden size"),
        ("heads", 8, "attention heads"),
        ("seq", 256, "sequence length"),
        ("vocab", 8192, "vocabulary"),
        ("batch", 16, "sequences in the global batch"),
        ("micro-batch", 2, "sequences in a microbatch"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    parser.add_argument("--precision", default="32-true", help="of the Trainer (default 32-true)")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--csv", default="", help="where to write the figures (default: no file)")
    parser.add_argument("--as", dest="contestant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--profile", default="", help="folder for a profile of two steps of every rank")
    return parser.parse_args()


def _sizes(layout: str) -> tuple[int, int, int, int]:
    found = re.fullmatch(r"t(\d+)p(\d+)v(\d+)d(\d+)", layout)
    if found is None:
        raise SystemExit(f"a layout is written as t2p2v1d1; got {layout!r}")
    t, p, v, d = map(int, found.groups())
    return t, p, v, d


def _contestant(name: str, options: argparse.Namespace) -> Contestant:
    ranks = 1
    if name != "plain":
        t, p, _, d = _sizes(name)
        ranks = t * p * d
    cores = os.cpu_count() or 1
    most = max((t * p * d for t, p, _, d in map(_sizes, options.layouts)), default=1)
    arguments = [argument for argument in sys.argv[1:] if argument not in options.layouts]
    return Contestant(
        name=name,
        num_ranks=ranks,
        command=[sys.executable, os.path.abspath(__file__), "--as", name, *arguments],
        threads=min(cores, most) if name == "plain" else max(1, cores // ranks),
    )


def compete(options: argparse.Namespace) -> None:
    """Train under one layout, a step a turn."""
    warnings.simplefilter("ignore")
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import Callback
    from lightning_ptdp.recipes.gpt.model import GPT
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    from lightning_ptdp import PTDPStrategy

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    L.seed_everything(1, verbose=False)
    is_plain = options.contestant == "plain"
    t, p, v, d = (1, 1, 1, 1) if is_plain else _sizes(options.contestant)
    rows = options.micro_batch if is_plain else options.batch // d
    accumulate = options.batch // options.micro_batch if is_plain else 1
    total = options.warmup + options.steps + (2 if options.profile else 0)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT(
                vocab_size=options.vocab,
                max_seq_len=options.seq,
                num_layers=options.layers,
                hidden_size=options.hidden,
                num_heads=options.heads,
                tie_embeddings=False,
            )

        def training_step(self, batch: Any, _: int) -> Any:
            return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

        def train_dataloader(self) -> Any:
            where = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
            sampler = DistributedSampler(Tokens(), shuffle=False, **where)  # rows in their own order under any layout
            return DataLoader(Tokens(), batch_size=rows, sampler=sampler)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)

    class Tokens(Dataset[Any]):
        def __len__(self) -> int:
            return options.batch * total

        def __getitem__(self, i: int) -> Any:
            row = torch.randint(options.vocab, (options.seq + 1,), generator=torch.Generator().manual_seed(i))
            return row[:-1], row[1:]

    class Turns(Callback):
        def __init__(self) -> None:
            self.gate, self.loss, self.profile = Gate(), 0.0, None

        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, i: int) -> None:
            if i % accumulate == 0:
                self.loss = 0.0
                self.gate.begin()
                if options.profile and i // accumulate == total - 2:
                    self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                    self.profile.__enter__()

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
            self.loss += float(outputs["loss"])
            if i % accumulate == accumulate - 1:
                if self.profile is not None and i // accumulate == total - 1:
                    self.profile.__exit__(None, None, None)
                    table = self.profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=60)
                    name = f"{options.contestant}-{trainer.global_rank}.txt"
                    Path(options.profile, name).write_text(table)
                self.gate.end(self.loss)

    strategy = (
        "auto"
        if is_plain
        else PTDPStrategy(
            tensor_parallel_size=t,
            pipeline_parallel_size=p,
            virtual_pipeline_size=v,
            micro_batch_size=options.micro_batch,
            schedule=options.schedule,
            sequence_parallel=options.sequence_parallel,
        )
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=1 if is_plain else t * p * d,
        accelerator="cpu",
        precision=options.precision,
        max_steps=total,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        callbacks=[Turns()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module())


def _report(contestants: list[Contestant], options: argparse.Namespace) -> None:
    import torch
    from rich.console import Console
    from rich.table import Table

    tokens = options.batch * options.seq
    plain = contestants[0].seconds[options.warmup :]
    rows = []
    for contestant in contestants:
        seconds = contestant.seconds[options.warmup :]
        ratios = sorted(a / b for a, b in zip(seconds, plain, strict=True))
        low, middle, high = (ratios[len(ratios) * k // 4] for k in (1, 2, 3))
        median = statistics.median(seconds)
        cpu = statistics.median(contestant.cpu[options.warmup :])
        rows.append(
            {
                "layout": contestant.name,
                "ranks": contestant.num_ranks,
                "threads a rank": contestant.threads,
                "step ms median": f"{median * 1e3:.0f}",
                "step ms min": f"{min(seconds) * 1e3:.0f}",
                "x plain median": f"{middle:.3f}",
                "x plain quartiles": f"{low:.2f}-{high:.2f}",
                "tokens/s": f"{tokens / median:.0f}",
                "CPU ms a step": f"{cpu * 1e3:.0f}",
                "peak MiB a rank": f"{contestant.peak_mib:.0f}",
                "last loss": f"{contestant.losses[-1]:.5f}",
            }
        )
    head = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}; "
        f"GPT {options.layers} x {options.hidden}, {options.heads} heads, sequence {options.seq}, vocabulary "
        f"{options.vocab}, global batch {options.batch}, microbatch {options.micro_batch}, {options.precision}; "
        f"{len(plain)} rounds after {options.warmup}"
    )
    table = Table(*rows[0], title=head)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=200).print(table)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            file.write(f"# {head}\n")
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
