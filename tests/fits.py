"""A fit as it is seen through Lightning, and its comparison with the same fit in one process.

Where `oracle` takes the engine's word for gradients and weights and compares with a loop of its own, this uses nothing
but what any Trainer offers, and compares with a plain ``Trainer(devices=1)``: for what Lightning's loops decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.oracle import ReplicaBatches, quiet_trainer, whole_state
from tests.spmd import run_spmd

Make = Callable[[], pl.LightningModule]

TOLERANCE = 1e-10  # absolute, in float64

# The plan that splits `Net` over tensor peers.
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def _layout(t: int = 1, p: int = 1, v: int = 1, d: int = 1, b: int = 1) -> dict[str, Any]:
    return {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_size": v,
        "data_parallel_size": d,
        "micro_batch_size": b,
        "tensor_parallel_plan": PLAN if t > 1 else None,
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "t2": _layout(t=2, b=2),
    "p2": _layout(p=2),
    "p2v2": _layout(p=2, v=2),
    "d2": _layout(d=2),
    "t2p2": _layout(t=2, p=2),
    "p2d2": _layout(p=2, d=2),
}


class Block(nn.Module):
    """Two layers, added to what goes through."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, h]."""
        return x + self.down(torch.tanh(self.up(x)))


class Net(pl.LightningModule):
    """A small regression. notes: what a subclass wants compared."""

    def __init__(self, *, num_layers: int = 4, size: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Linear(size, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_layers))
        self.head = nn.Linear(size, 1)
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, h]. Returns [b]."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean squared error."""
        return F.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        """The loss."""
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        """With a state, so that a step too many shows."""
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


@dataclass
class Fit:
    """What a fit did.

    losses, rates, steps: of each batch: the loss, each parameter group's learning rate, and the optimizer steps so far.
    epoch: the epoch that followed the last. weights: at the end, of the whole module; empty below rank 0.
    notes: of the module.
    """

    losses: list[float | None] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    epoch: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)


class Tracker(Callback):
    """Takes a fit down."""

    def __init__(self) -> None:
        self.fit = Fit()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch."""
        self.fit.losses.append(float(outputs["loss"]) if outputs else None)
        self.fit.rates.append([group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups])
        self.fit.steps.append(trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The weights."""
        state = whole_state(trainer)
        self.fit.weights = {name: value.clone() for name, value in state.items()}


def fit(
    make: Make,
    batches: Sequence[Any] | pl.LightningDataModule,
    strategy: Mapping[str, Any] | None,
    trainer: Mapping[str, Any],
    callbacks: Sequence[Callable[[], Callback]] = (),
) -> Fit:
    """Fit in this process, or as a rank of the pool's world.

    batches: global ones, or a data module. strategy: arguments of `PTDPStrategy`; None for a plain Trainer.
    """
    seed_everything()
    module, tracker = make(), Tracker()
    runner = quiet_trainer(
        "auto" if strategy is None else PTDPStrategy(**strategy),
        callbacks=[tracker, *(make_callback() for make_callback in callbacks)],
        **{"precision": "64-true", "use_distributed_sampler": False, **trainer},
    )
    runner.fit(module, datamodule=batches if isinstance(batches, pl.LightningDataModule) else ReplicaBatches(batches))
    tracker.fit.epoch, tracker.fit.notes = runner.current_epoch, getattr(module, "notes", [])
    return tracker.fit


def fit_under(layout: str | Mapping[str, Any], make: Make, batches: Any, **arguments: Any) -> list[Fit]:
    """The fit as each rank of a world of the pool saw it."""
    strategy = LAYOUTS[layout] if isinstance(layout, str) else layout
    sizes = [strategy.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline", "data")]
    return run_spmd(
        fit,
        world_size=sizes[0] * sizes[1] * sizes[2],
        timeout=20,
        make=make,
        batches=batches,
        strategy=strategy,
        **({"trainer": {}, "callbacks": ()} | arguments),
    )


def assert_like_one_process(
    layout: str | Mapping[str, Any], make: Make, batches: Any, *, tolerance: float = TOLERANCE, **arguments: Any
) -> tuple[list[Fit], Fit]:
    """Fit under a layout and in one process, and compare; returns both."""
    one = fit(make, batches, None, **({"trainer": {}} | arguments))
    fits = fit_under(layout, make, batches, **arguments)
    for rank, seen in enumerate(fits):
        where = f"rank {rank}: "
        assert seen.steps == one.steps, f"{where}{seen.steps} steps where one process makes {one.steps}"
        assert seen.epoch == one.epoch, f"{where}ends before epoch {seen.epoch}, one process before {one.epoch}"
        assert seen.losses == fits[0].losses, f"{where}other losses than on rank 0"
        assert_near(seen.rates, one.rates, f"{where}rates", tolerance)
    assert_near(fits[0].losses, one.losses, "losses", tolerance)
    assert fits[0].weights.keys() == one.weights.keys()
    for name, value in one.weights.items():
        torch.testing.assert_close(fits[0].weights[name], value, rtol=0.0, atol=tolerance, msg=f"{name} differs")
    return fits, one


def assert_near(found: Any, expected: Any, where: str, tolerance: float = TOLERANCE) -> None:
    """Compare nested lists of numbers."""
    if isinstance(expected, list):
        assert len(found) == len(expected), f"{where}: {found} where one process has {expected}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_near(a, b, f"{where}[{i}]", tolerance)
    elif isinstance(expected, float):
        assert abs(found - expected) <= tolerance, f"{where}: {found} where one process has {expected}"
    else:
        assert found == expected, f"{where}: {found} where one process has {expected}"


def points(num_rows: int, seed: int, size: int = 4) -> dict[str, Tensor]:
    """A batch for `Net`, in float64 as it reaches the step."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_rows, size, generator=generator),
        "y": torch.randn(num_rows, generator=generator),
    }


def batches_of(*sizes: int) -> list[dict[str, Tensor]]:
    """Global batches of so many rows."""
    return [points(size, seed) for seed, size in enumerate(sizes)]
