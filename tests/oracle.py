"""The yardstick: a run under any layout gives the numbers of the same run in one process.

`serial` trains a module in plain PyTorch, in float64, on whole global batches. `parallel` trains it through
`Trainer(strategy=PTDPStrategy(...))` in a world of the pool, and joins what the ranks hold under the plain module's
names. Both return a `Run`; `assert_same` compares two.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.schedule import Span
from lightning_ptdp.tensor_parallel.shard import Shard
from lightning_ptdp.topology import Coordinate
from tests.hygiene import seed_everything
from tests.spmd import PoolEnvironment, run_spmd

Make = Callable[[], pl.LightningModule]
Tensors = dict[str, Tensor]

TOLERANCE = 1e-10  # absolute, in float64: sums of the same numbers in another order


@dataclass
class Run:
    """What a training run did, under the plain module's names.

    initial: weights before the first step. losses: a batch each.
    gradients: before each optimizer step, and before clipping. weights: after each optimizer step.
    logged: of each batch, the metrics that callbacks see after it.
    """

    initial: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Part(Run):
    """What one rank saw of a run.

    at: its coordinate. shards: of what its tensor peers split. spans: what its runtime did in each batch.
    """

    at: Coordinate = field(default_factory=lambda: Coordinate(0, 0, 0))
    shards: Mapping[str, Shard] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


def serial(
    make: Make,
    batches: Sequence[Any],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    clip_algorithm: str = "norm",
) -> Run:
    """Train in plain PyTorch, in this process."""
    seed_everything()
    module = make().double()
    run, step_logs = Run(initial=_copy(module.named_parameters())), {}
    module.log = lambda name, value, **_: step_logs.update({name: value.item()})
    optimizer = module.configure_optimizers()
    for i, batch in enumerate(batches):
        step_logs.clear()
        output = module.training_step(_double(batch), i)
        loss = output["loss"] if isinstance(output, Mapping) else output
        (loss / accumulate).backward()
        run.losses.append(loss.item())
        run.logged.append(dict(step_logs))
        if (i + 1) % accumulate and i + 1 < len(batches):
            continue
        run.gradients.append(_copy((name, p.grad) for name, p in module.named_parameters() if p.grad is not None))
        if clip is not None and clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        elif clip is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        run.weights.append(_copy(module.named_parameters()))
    return run


def parallel(
    make: Make,
    batches: Sequence[Any] | pl.LightningDataModule,
    *,
    world_size: int | None = None,
    trainer: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    **strategy: Any,
) -> tuple[Run, list[Part]]:
    """Train in a world of the pool.

    batches: global ones, of which replica r of d takes the r-th of d nearly equal parts of the rows; or a data module.
    world_size: None takes t * p * d. trainer: arguments of the Trainer. strategy: of `PTDPStrategy`.

    Returns the whole run, and each rank's part of it in the order of ranks. Copies that several ranks hold of the same
    tensor have the same bits, or this raises.
    """
    sizes = [strategy.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline", "data")]
    parts = run_spmd(
        train,
        world_size=world_size or sizes[0] * sizes[1] * sizes[2],
        timeout=timeout,
        make=make,
        batches=batches,
        trainer=dict(trainer or {}),
        strategy=strategy,
    )
    return join(parts), parts


def train(make: Make, batches: Any, trainer: dict[str, Any], strategy: dict[str, Any] | str) -> Part:
    """The body of `parallel`: what this rank saw."""
    seed_everything()
    module, recorder = make(), Recorder()
    chosen = PTDPStrategy(**strategy) if isinstance(strategy, dict) else strategy
    callbacks = [recorder, *trainer.pop("callbacks", ())]
    quiet_trainer(chosen, callbacks=callbacks, precision="64-true", use_distributed_sampler=False, **trainer).fit(
        module, datamodule=batches if isinstance(batches, pl.LightningDataModule) else ReplicaBatches(batches)
    )
    return recorder.part


def quiet_trainer(strategy: PTDPStrategy | str, **arguments: Any) -> pl.Trainer:
    """A Trainer in a world of the pool, or alone in this process: one epoch, and nothing printed or written."""
    is_in_pool = torch.distributed.is_initialized()
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": torch.distributed.get_world_size() if is_in_pool else 1,
        "plugins": [PoolEnvironment()] if is_in_pool else [],
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, **(usual | arguments))


def whole_state(trainer: pl.Trainer) -> dict[str, Any]:
    """The whole module's state on rank 0, under any strategy."""
    strategy = trainer.strategy
    if isinstance(strategy, PTDPStrategy):
        return strategy.whole_state_dict()
    return strategy.lightning_module_state_dict()


class ReplicaBatches(pl.LightningDataModule):
    """Ready batches, of which each replica takes its rows."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        """In their own order."""
        assert self.trainer is not None, "set by the Trainer"
        where = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        mine = [rows_of(batch, where["rank"], where["num_replicas"]) for batch in self.batches]
        return DataLoader(mine, batch_size=None)  # type: ignore[arg-type]


def rows_of(batch: Any, replica: int, num_replicas: int) -> Any:
    """The rows of a global batch that a replica trains on."""

    def take(leaf: Any) -> Any:
        return leaf.tensor_split(num_replicas)[replica] if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(take, batch)


class Recorder(Callback):
    """Takes down a run as callbacks see it."""

    def __init__(self) -> None:
        self.part = Part()
        self._num_steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take down the layout and the initial weights."""
        strategy = trainer.strategy
        assert isinstance(strategy, PTDPStrategy), "the strategy under test"
        self._engine = strategy.engine
        self.part.at, self.part.shards = strategy.groups.at, self._engine.parameters.placement.shards
        self.part.initial = self._weights()
        self._engine.record(self.part.spans)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Take down the gradients."""
        names = self._engine.parameters.names
        self.part.gradients.append(_copy((names[p], p.grad) for p in pl_module.parameters() if p.grad is not None))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take down the loss, what was logged and, where the optimizer has stepped, the weights."""
        self.part.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)  # Lightning divides it
        self.part.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if trainer.global_step > self._num_steps:
            self._num_steps = trainer.global_step
            self.part.weights.append(self._weights())

    def _weights(self) -> Tensors:
        return _copy((name, parameter) for parameter, name in self._engine.parameters.names.items())


def join(parts: Sequence[Part]) -> Run:
    """The run that the ranks' parts are parts of.

    Raises:
        AssertionError: ranks disagree on a loss, or on a tensor of which they hold copies.
    """
    for part in parts:
        assert part.losses == parts[0].losses, f"losses differ between ranks: {part.losses}, {parts[0].losses}"
    return Run(
        initial=_join([part.initial for part in parts], parts),
        losses=parts[0].losses,
        gradients=[_join(step, parts) for step in zip(*(part.gradients for part in parts), strict=True)],
        weights=[_join(step, parts) for step in zip(*(part.weights for part in parts), strict=True)],
        logged=parts[0].logged,
    )


def assert_same(run: Run, one: Run, *, tolerance: float = TOLERANCE) -> None:
    """Compare losses, gradients and weights, all of them and by name."""
    assert run.initial.keys() == one.initial.keys(), run.initial.keys() ^ one.initial.keys()
    for name, value in one.initial.items():
        assert torch.equal(run.initial[name], value), f"the initial {name} has other bits"
    losses, expected = (torch.tensor(each.losses, dtype=torch.float64) for each in (run, one))
    _assert_near({"loss": losses}, {"loss": expected}, "of all batches", tolerance)
    for what in ("gradients", "weights"):
        steps, expected = getattr(run, what), getattr(one, what)
        assert len(steps) == len(expected), f"{len(steps)} optimizer steps where one process makes {len(expected)}"
        for i, (mine, theirs) in enumerate(zip(steps, expected, strict=True)):
            _assert_near(mine, theirs, f"{what} of step {i}", tolerance)


def _assert_near(mine: Tensors, theirs: Tensors, where: str, tolerance: float) -> None:
    assert mine.keys() == theirs.keys(), f"{where}: {mine.keys() ^ theirs.keys()}"
    for name, value in theirs.items():
        assert mine[name].shape == value.shape, f"{where}: {name} is {tuple(mine[name].shape)}"
        torch.testing.assert_close(
            mine[name], value, rtol=0.0, atol=tolerance, msg=lambda text, at=f"{where}, {name}": f"{at}: {text}"
        )


def _join(tensors: Sequence[Tensors], parts: Sequence[Part]) -> Tensors:
    """Whole tensors by name: copies are compared, shards joined in the order of tensor ranks."""
    whole: Tensors = {}
    names = {name for held in tensors for name in held}
    for name in sorted(names):
        holders = [
            (part.at.tensor, part, held[name]) for part, held in zip(parts, tensors, strict=True) if name in held
        ]
        by_rank: dict[int, Tensor] = {}
        for rank, _, value in holders:
            first = by_rank.setdefault(rank, value)
            assert torch.equal(first, value), f"copies of {name} differ between ranks"
        shard = next((part.shards[name] for _, part, _ in holders if name in part.shards), None)
        if shard is None:
            assert all(torch.equal(value, by_rank[0]) for value in by_rank.values()), f"copies of {name} differ"
            whole[name] = by_rank[0]
        else:
            whole[name] = shard.join([by_rank[rank] for rank in sorted(by_rank)])
    return whole


def _copy(named: Any) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in named}


def _double(batch: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )
