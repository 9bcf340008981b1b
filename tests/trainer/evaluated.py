"""What the tests of evaluation share: a module that tells what it saw, its data, and the run in one process."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ptdp import PTDPStrategy
from tests.models import GPT, Batch, Rows, texts
from tests.oracle import quiet_trainer
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN


def numbered(num_rows: int, *, first: int = 0) -> Batch:
    """Texts whose rows know their number."""
    return texts(num_rows, seed=first) | {"row": torch.arange(first, first + num_rows)}


def once(rows: Sequence[int]) -> float:
    """What "seen" is if each of these rows counted once."""
    return float(sum(4**row for row in rows))


class Surveyed(GPT):
    """Logs in evaluation its loss, which rows it saw and how often (in base 4), and a metric."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean_row = MeanMetric()

    def evaluate(self, batch: Any) -> Tensor:
        """batch: of rows, or of parts of rows."""
        batch = joined(batch)
        loss, rows = self.loss(batch), batch["row"].double()
        self.mean_row.update(rows)
        self.log("loss", loss, sync_dist=True, batch_size=len(rows))
        self.log("seen", (4**rows).sum(), reduce_fx="sum", sync_dist=True, batch_size=len(rows))
        self.log("mean_row", self.mean_row, batch_size=len(rows))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """As `evaluate`."""
        return self.evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """As `evaluate`."""
        return self.evaluate(batch)


def joined(batch: Any) -> Batch:
    """The rows of the parts of a batch."""
    if isinstance(batch, Mapping) and "ids" in batch:
        return dict(batch)
    parts = [part for part in (batch.values() if isinstance(batch, Mapping) else batch) if part is not None]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class Loaders(pl.LightningDataModule):
    """Loaders over numbered rows, for every stage the same.

    sizes: rows of each loader. batch_size: of all replicas together. options: of each DataLoader. mode: of a
    CombinedLoader.
    """

    def __init__(
        self, sizes: Sequence[int], batch_size: int, *, mode: str | None = None, train_rows: int = 12, **options: Any
    ) -> None:
        super().__init__()
        self.sizes, self.batch_size, self.mode, self.options = sizes, batch_size, mode, options
        self.train_rows = train_rows

    def loader(self, rows: Batch) -> DataLoader[Batch]:
        """An ordinary one."""
        assert self.trainer is not None
        replicas = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        return DataLoader(Rows(rows), batch_size=self.batch_size // replicas, **self.options)

    def loaders(self) -> Any:
        """One, a list, or a combination."""
        firsts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        found = [self.loader(numbered(n, first=first)) for n, first in zip(self.sizes, firsts, strict=True)]
        if self.mode is not None:
            return CombinedLoader(dict(zip("abc", found, strict=False)), self.mode)
        return found if len(found) > 1 else found[0]

    val_dataloader = test_dataloader = predict_dataloader = loaders


EMPTY_LOADER = "Total length of `DataLoader` across ranks is zero"  # Lightning's warning

LAYOUTS: dict[str, dict[str, int]] = {
    "t2": {"tensor_parallel_size": 2},
    "d2": {"data_parallel_size": 2},
    "d4": {"data_parallel_size": 4},
    "p2": {"pipeline_parallel_size": 2},
    "p2d2": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    "t2p2v2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
}


def world_size(layout: str) -> int:
    """Ranks of a layout."""
    sizes = LAYOUTS[layout]
    return sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1) * num_replicas(layout)


def num_replicas(layout: str) -> int:
    """d of a layout."""
    return LAYOUTS[layout].get("data_parallel_size", 1)


def trainer(layout: str | None, *, strategy: Mapping[str, Any] | None = None, **arguments: Any) -> pl.Trainer:
    """A quiet Trainer in float64; None is one process without the strategy."""
    arguments = {"precision": "64-true", "num_sanity_val_steps": 0} | arguments
    if layout is None:
        return quiet_trainer("auto", **({"plugins": None} | arguments))
    plan = {"tensor_parallel_plan": PLAN} if "t2" in layout else {}
    return quiet_trainer(PTDPStrategy(**LAYOUTS[layout], **plan, **(strategy or {})), **arguments)


def on_every_rank(body: Any, layout: str, **arguments: Any) -> list[Any]:
    """What `body(layout, **arguments)` returns on each rank."""
    return run_spmd(body, world_size=world_size(layout), timeout=60, layout=layout, **arguments)


def in_one_process(body: Any, **arguments: Any) -> Any:
    """What it returns here, without the strategy."""
    return run_spmd(_without_advice, world_size=1, timeout=60, body=body, arguments=arguments)[0]


def _without_advice(body: Any, arguments: dict[str, Any]) -> Any:
    with warnings.catch_warnings():  # where a process group exists, Lightning takes one process for distributed
        warnings.filterwarnings("ignore", r"It is recommended to use `self\.log")
        return body(layout=None, **arguments)
