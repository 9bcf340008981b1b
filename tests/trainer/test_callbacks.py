"""Every callback that Lightning ships does what it does in one process, or is refused by name: a row each.

Freezing is in test_finetuning.py, averages of weights in test_weight_averages.py, checkpoints and early stopping in
test_deciding_callbacks.py.
"""

import copy
import inspect
import json
import logging
import pkgutil
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp.checkpoint.reading import read_checkpoint
from lightning_ptdp.layout import Layout
from lightning_ptdp.pipeline.partition import partition
from lightning_ptdp.preflight.holdings import holdings
from lightning_ptdp.tensor_parallel.placement import place
from lightning_ptdp.topology import Topology
from tests.docs.pages import CHECKOUT
from tests.hygiene import seed_everything
from tests.models import GPT, Rows, texts
from tests.oracle import ReplicaBatches, quiet_trainer, whole_state
from tests.spmd import run_spmd
from tests.trainer.test_finetuning import check_weights, no_sync_advice, strategy, world
from tests.trainer.test_layouts import PLAN

T2P2 = {"t": 2, "p": 2}


# -- the table of the documentation ------------------------------------------------------------------------------------


def callbacks_of_the_package():
    """Names of all public callbacks that modules of lightning.pytorch.callbacks define."""
    modules = [import_module(found.name) for found in pkgutil.walk_packages(shipped.__path__, f"{shipped.__name__}.")]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Callback) and value.__module__ == module.__name__
        if not name.startswith("_")
    }


def test_table_of_the_documentation_has_every_callback_that_lightning_ships():
    rows = re.findall(r"^\| `(\w+)` \|", (CHECKOUT / "docs/callbacks.md").read_text(), re.M)
    assert len(rows) == len(set(rows))
    assert set(rows) == callbacks_of_the_package() | set(shipped.__all__)


# -- the same run with and without the strategy ------------------------------------------------------------------------


class CallbackGPT(GPT):
    """Validates, predicts, has a schedule, and knows its FLOPs."""

    flops_per_batch = 1000

    def __init__(self, num_layers=2):
        super().__init__(num_layers=num_layers, tied=True, optimizer="adamw", lr=0.01)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch["ids"]).mean((1, 2))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Batches(ReplicaBatches):
    """Three batches for all that a Trainer does."""

    def __init__(self):
        super().__init__([texts(4, seed=i) for i in range(3)])

    def val_dataloader(self):
        return self.train_dataloader()

    def predict_dataloader(self):
        return DataLoader(Rows(texts(8)), batch_size=4)


@dataclass(frozen=True)
class Case:
    """A run with callbacks.

    make: callbacks. observe: (trainer, callbacks, what was printed) -> what must be the same, on every rank or, where
    `on_rank_zero`, on that alone. sizes: layouts. trainer: further arguments. module: of the run. act: what is run.
    """

    make: Callable[[], list[Callback]]
    observe: Callable[..., Any] = lambda *_: None
    on_rank_zero: bool = False
    sizes: tuple[dict[str, int], ...] = (T2P2,)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], Any] = CallbackGPT
    act: str = "fit"


def play(name, sizes, folder):
    """What is observed, and the weights afterwards."""
    case, printed = CASES[name], StringIO()
    seed_everything()
    callbacks = case.make()
    arguments = {"max_epochs": 2, "logger": CSVLogger(folder), "log_every_n_steps": 1, "default_root_dir": folder}
    arguments |= {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    log = logging.getLogger("lightning.pytorch")
    handler = logging.StreamHandler(printed)
    with redirect_stdout(printed), no_sync_advice(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Precision 64-true|.*does not have many workers")
        log.addHandler(handler)
        try:
            trainer = quiet_trainer(
                "auto" if sizes is None else strategy(**sizes),
                callbacks=callbacks,
                precision="64-true",
                use_distributed_sampler=False,
                **(arguments | case.trainer),
            )
            getattr(trainer, case.act)(case.module(), datamodule=Batches())
        finally:
            log.removeHandler(handler)
    state = whole_state(trainer) if case.act == "fit" else {}
    return case.observe(trainer, callbacks, printed.getvalue()), state


def rows_of_the_logger(trainer, pattern):
    """(step, value) of each column of the metrics file that matches."""
    if not trainer.is_global_zero:
        return {}
    trainer.logger.save()
    path = Path(trainer.logger.log_dir, "metrics.csv")
    if not path.exists():
        return {}
    header, *lines = [line.split(",") for line in path.read_text().splitlines()]
    steps = header.index("step")
    return {
        name: [(int(line[steps]), float(line[i])) for line in lines if line[i]]
        for i, name in enumerate(header)
        if re.search(pattern, name)
    }


class SeenSummary(ModelSummary):
    """Keeps what it would print."""

    seen: Any = None

    @staticmethod
    def summarize(*args, **kwargs):
        SeenSummary.seen = (args, kwargs)


class Bar(ProgressBar):
    """A bar of one's own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def disable(self):
        pass

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((batch_idx, self.total_train_batches, self.get_metrics(trainer, pl_module).get("val_loss")))


class Counting(Callback):
    """Has a state."""

    def __init__(self):
        self.batches, self.restored = 0, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.restored = state_dict


def all_hooks():
    """A LambdaCallback that notes every hook, and the notes."""
    notes = []
    hooks = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    called = {name: (lambda *_, name=name, **__: notes.append(name)) for name in hooks}
    callback = LambdaCallback(**{name: call for name, call in called.items() if "checkpoint" not in name})
    callback.notes = notes
    return callback


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epoch = [], None

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((prediction.tolist(), batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.epoch = ([each.tolist() for each in predictions], batch_indices)


class Own(Checkpoint):
    """A checkpoint callback of one's own: it saves on every rank, as it must."""

    def __init__(self):
        self.files = []

    def on_train_epoch_end(self, trainer, pl_module):
        path = Path(trainer.default_root_dir, f"own-{trainer.current_epoch}.ckpt")
        trainer.save_checkpoint(path)
        self.files.append((path.name, sorted(read_checkpoint(path)["state_dict"])))


def rates(trainer, callbacks, _):
    monitor = callbacks[0]
    return monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values


def relative_throughput(trainer, callbacks, _):
    """Counts as they are, rates as parts of the rate of samples: time is left out."""
    logged = rows_of_the_logger(trainer, "^train.*/(samples|batches|lengths|.*_per_sec|mfu)$")
    rate = dict(logged.get("train/device/samples_per_sec", ()))
    return {
        name: [(step, value / rate[step] if "per_sec" in name else value) for step, value in values]
        for name, values in logged.items()
    }


def tqdm_lines(_, __, printed):
    """The last state of each bar, without times."""
    lines = [line for part in printed.split("\n") for line in part.split("\r")[-1:] if "|" in line]
    return [re.sub(r"\[.*?it/s|\d+:\d+<.*?[,\]]|v_num=[^,\]]*", "", line) for line in lines]


def summary_of(*_):
    args, kwargs = SeenSummary.seen or ((), {})
    SeenSummary.seen = None
    return args, kwargs


CASES = {
    "LearningRateMonitor": Case(lambda: [LearningRateMonitor(log_momentum=True, log_weight_decay=True)], rates),
    "LearningRateMonitor's rows": Case(
        lambda: [LearningRateMonitor()], lambda trainer, *_: rows_of_the_logger(trainer, "^lr"), on_rank_zero=True
    ),
    "GradientAccumulationScheduler": Case(
        lambda: [GradientAccumulationScheduler({1: 2})],
        lambda trainer, *_: (trainer.global_step, trainer.accumulate_grad_batches),
        sizes=(T2P2, {"p": 2, "d": 2}),
    ),
    "Timer": Case(
        lambda: [Timer(timedelta(0), verbose=False)],
        lambda trainer, callbacks, _: (trainer.global_step, callbacks[0].time_elapsed() > 0),
    ),
    "LambdaCallback": Case(lambda: [all_hooks()], lambda _, callbacks, __: callbacks[0].notes),
    "ModelSummary": Case(lambda: [SeenSummary()], summary_of, on_rank_zero=True),
    "ModelSummary of depth 2": Case(lambda: [SeenSummary(2)], summary_of, on_rank_zero=True),
    "ModelSummary of all": Case(
        lambda: [SeenSummary(max_depth=-1)],
        summary_of,
        on_rank_zero=True,
        sizes=(T2P2, {"p": 2, "v": 2}),
        module=partial(CallbackGPT, 4),
    ),
    "ModelSummary in the log": Case(
        lambda: [ModelSummary(2)],
        lambda *seen: [line for line in seen[2].splitlines() if " | " in line or "params" in line],
        on_rank_zero=True,
    ),
    "RichModelSummary": Case(
        lambda: [RichModelSummary(2, header_style="bold")],
        lambda *seen: [line for line in seen[2].splitlines() if "\u2502" in line or "params" in line],
        on_rank_zero=True,
    ),
    "ProgressBar": Case(
        lambda: [Bar()], lambda _, callbacks, __: callbacks[0].seen, trainer={"enable_progress_bar": True}
    ),
    "TQDMProgressBar": Case(
        lambda: [TQDMProgressBar()], tqdm_lines, on_rank_zero=True, trainer={"enable_progress_bar": True}
    ),
    "RichProgressBar": Case(
        lambda: [RichProgressBar(leave=True)],
        lambda *seen: re.findall(r"Epoch \d/\d|\b\d/\d\b|\w+_loss\w*: [\d.]+", seen[2]),
        on_rank_zero=True,
        trainer={"enable_progress_bar": True},
    ),
    "ThroughputMonitor": Case(
        lambda: [ThroughputMonitor(lambda batch: len(batch["ids"]), lambda batch: batch["ids"].numel(), window_size=2)],
        relative_throughput,
        on_rank_zero=True,
    ),
    "LearningRateFinder": Case(
        lambda: [LearningRateFinder(min_lr=1e-4, num_training_steps=20)],
        lambda trainer, callbacks, _: (
            callbacks[0].optimal_lr.results,
            callbacks[0].optimal_lr.suggestion(),
            trainer.lightning_module.lr,
            sorted(path.name for path in Path(trainer.default_root_dir).glob(".lr_find*")),
        ),
        trainer={"max_epochs": 1},
    ),
    "Callback": Case(
        lambda: [Counting()],
        lambda trainer, callbacks, _: (callbacks[0].state_dict(), trainer.global_step),
    ),
    "Checkpoint": Case(
        lambda: [Own()], lambda _, callbacks, __: callbacks[0].files, trainer={"enable_checkpointing": True}
    ),
    "BasePredictionWriter": Case(
        lambda: [Writer()],
        lambda _, callbacks, __: (callbacks[0].batches, callbacks[0].epoch),
        act="predict",
        on_rank_zero=True,
    ),
    "ModelPruning under d": Case(
        lambda: [ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3), Own()],
        lambda _, callbacks, __: callbacks[1].files,
        sizes=({"d": 2},),
        trainer={"enable_checkpointing": True},
        module=lambda: CallbackGPT().double(),  # the callback keeps the first weights in their own dtype
    ),
}


@pytest.mark.parametrize(("name", "sizes"), [(name, sizes) for name, case in CASES.items() for sizes in case.sizes])
def test_callback_does_what_it_does_in_one_process(name, sizes, tmp_path):
    ((expected, weights),) = run_spmd(play, world_size=1, name=name, sizes=None, folder=str(tmp_path / "one"))
    results = run_spmd(play, world_size=world(sizes), timeout=60, name=name, sizes=sizes, folder=str(tmp_path / "many"))
    assert expected not in (None, [], {}), "nothing was observed"
    for seen, _ in results[:1] if CASES[name].on_rank_zero else results:
        check_near(seen, expected)
    check_weights(results[0][1], weights)


def check_near(seen, expected, where=""):
    """Equal structures, with floats near each other."""
    if isinstance(expected, dict):
        assert seen.keys() == expected.keys(), f"{where}: {seen.keys()}"
        for key, value in expected.items():
            check_near(seen[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(seen) == len(expected), f"{where}: {seen}, not {expected}"
        for i, value in enumerate(expected):
            check_near(seen[i], value, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert seen == pytest.approx(expected, rel=1e-6, abs=1e-9), where  # Lightning adds up in float32
    else:
        assert seen == expected, where


# -- what one process alone can do, and what ends a run ----------------------------------------------------------------


class NormGPT(CallbackGPT):
    """With batch norm."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(4)


REFUSED = {
    "BatchSizeFinder": (BatchSizeFinder, "find the size in a run of one process, or by micro_batch_size"),
    "ModelPruning": (partial(ModelPruning, "l1_unstructured"), "compares weights of the whole model"),
    "StochasticWeightAveraging": (partial(StochasticWeightAveraging, 0.1), "refresh batch norm"),
}


def refuse(names):
    module = NormGPT()
    module.batch_size = 4
    callbacks = [REFUSED[name][0]() for name in names]
    trainer = quiet_trainer(strategy(**T2P2), callbacks=callbacks, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="PTDPStrategy cannot run this") as caught:
        trainer.fit(module, datamodule=Batches())
    return str(caught.value)


def test_callbacks_that_cannot_be_right_are_refused_by_name_all_at_once():
    for told in run_spmd(refuse, world_size=4, timeout=60, names=list(REFUSED)):
        for name, (_, reason) in REFUSED.items():
            assert re.search(f"- {name} .*{reason}", told)


class SizedGPT(CallbackGPT):
    """Its batch size can be found."""

    def __init__(self):
        super().__init__()
        self.batch_size = 1

    def train_dataloader(self):
        return DataLoader(Rows(texts(16)), batch_size=self.batch_size)

    def val_dataloader(self):
        return self.train_dataloader()


def find_size(strategy_name, folder):
    finder = BatchSizeFinder(steps_per_trial=1, max_trials=3)
    trainer = quiet_trainer(strategy_name, callbacks=[finder], default_root_dir=folder, max_steps=1)
    module = SizedGPT()
    with no_sync_advice():
        trainer.fit(module)
    return finder.optimal_batch_size, module.batch_size, trainer.global_step


def test_batch_size_is_found_in_one_process(tmp_path):
    found = [run_spmd(find_size, world_size=1, strategy_name=name, folder=str(tmp_path)) for name in ("auto", "ptdp")]
    assert found[0] == found[1] == [(8, 8, 1)]


class SpikingGPT(CallbackGPT):
    """Its loss jumps in the third batch."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (50 if batch_idx == 2 else 1)


def spike(sizes, folder):
    trainer = quiet_trainer(
        "auto" if sizes is None else strategy(**sizes),
        callbacks=[SpikeDetection(exclude_batches_path=folder, atol=1.0)],
        use_distributed_sampler=False,
    )
    with no_sync_advice(), pytest.raises(TrainingSpikeException):
        trainer.fit(SpikingGPT(), datamodule=Batches())
    return trainer.global_step


def test_spike_ends_the_run_on_every_rank_and_is_written_down(tmp_path):
    one = run_spmd(spike, world_size=1, sizes=None, folder=str(tmp_path / "one"))
    assert run_spmd(spike, world_size=4, timeout=60, sizes=T2P2, folder=str(tmp_path / "many")) == one * 4
    files = [json.loads((tmp_path / name / "skip_batches.json").read_text()) for name in ("one", "many")]
    assert files[0] == files[1] == [1, 2]


class FailingGPT(CallbackGPT):
    """Fails on every rank in its second batch."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            raise ArithmeticError("bad batch")


def fail(sizes, folder):
    callback = OnExceptionCheckpoint(folder)
    trainer = quiet_trainer(
        strategy(**sizes), callbacks=[callback], use_distributed_sampler=False, enable_checkpointing=True
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ckpt_path")  # Lightning would resume from the callback's file
        with pytest.raises((ArithmeticError, RuntimeError)) as caught:
            trainer.fit(FailingGPT(), datamodule=Batches())
    return str(caught.value), Path(callback.ckpt_path).exists()


def test_checkpoint_on_exception_is_saved_by_one_process_alone(tmp_path):
    assert run_spmd(fail, world_size=1, sizes={}, folder=str(tmp_path / "one")) == [("bad batch", True)]
    for told, is_saved in run_spmd(fail, world_size=2, timeout=60, sizes={"p": 2}, folder=str(tmp_path / "two")):
        assert "no checkpoint can be saved after a failure" in told
        assert not is_saved


def monitor_devices(sizes, folder):
    trainer = quiet_trainer(
        "auto" if sizes is None else strategy(**sizes),
        callbacks=[DeviceStatsMonitor()],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    with (
        patch("lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE", True),
        patch("lightning.pytorch.accelerators.cpu.get_cpu_stats", lambda: {"cpu_percent": 7.0}),
        no_sync_advice(),
    ):
        trainer.fit(CallbackGPT(), datamodule=Batches())
    return rows_of_the_logger(trainer, "cpu_percent")


def test_device_statistics_are_logged_once(tmp_path):
    (one,) = run_spmd(monitor_devices, world_size=1, sizes=None, folder=str(tmp_path / "one"))
    many = run_spmd(monitor_devices, world_size=2, timeout=60, sizes={"p": 2}, folder=str(tmp_path / "many"))
    assert many[0] == one
    assert len(one["DeviceStatsMonitor.on_train_batch_end/cpu_percent"]) == 3


# -- throughput, states, summaries -------------------------------------------------------------------------------------


def measure(sizes):
    """What is logged of two batches, and the peak rate that it is compared with."""
    logged = {}
    monitor = ThroughputMonitor(lambda batch: len(batch["ids"]), lambda batch: batch["ids"].numel(), window_size=2)
    with (
        patch("lightning_ptdp.callbacks.users.get_available_flops", lambda device, dtype: 100),
        patch.object(CSVLogger, "log_metrics", lambda self, metrics, step=None: logged.update(metrics)),
    ):
        trainer = quiet_trainer(
            strategy(**sizes),
            callbacks=[monitor],
            logger=CSVLogger("."),
            log_every_n_steps=1,
            limit_val_batches=0,
            use_distributed_sampler=False,
        )
        trainer.fit(CallbackGPT(), datamodule=Batches())
    return logged, monitor.available_flops


@pytest.mark.parametrize("sizes", [T2P2, {"p": 2, "d": 2}], ids=["t2p2", "p2d2"])
def test_throughput_counts_replicas_and_not_processes(sizes):
    logged, available = run_spmd(measure, world_size=4, timeout=60, sizes=sizes)[0]
    d = sizes.get("d", 1)
    assert available == 100 * 4 // d
    samples = logged["train/device/samples_per_sec"]
    flops = logged["train/device/flops_per_sec"]
    assert logged["train/samples"] == 3 * 4 // d
    assert logged["train/device/items_per_sec"] == pytest.approx(16 * samples)
    assert flops == pytest.approx(samples / (4 / d) * CallbackGPT.flops_per_batch)
    assert logged["train/device/mfu"] == pytest.approx(flops / available)
    assert logged.get("train/samples_per_sec") == (pytest.approx(2 * samples) if d == 2 else None)
    assert logged.get("train/flops_per_sec") == (pytest.approx(2 * flops) if d == 2 else None)


def resume(path, save):
    counting, timer = Counting(), Timer(timedelta(hours=1), verbose=False)
    trainer = quiet_trainer(
        strategy(p=2), callbacks=[counting, timer], max_epochs=1 if save else 3, use_distributed_sampler=False
    )
    if not save:
        timer._duration = 0.0  # used up before it goes on
    trainer.fit(CallbackGPT(), datamodule=Batches(), ckpt_path=None if save else path)
    if save:
        trainer.save_checkpoint(path)
    return counting.restored, trainer.global_step


def test_states_of_callbacks_are_restored_and_a_used_up_timer_ends_the_run(tmp_path):
    path = str(tmp_path / "last.ckpt")
    run_spmd(resume, world_size=2, timeout=60, path=path, save=True)
    for restored, step in run_spmd(resume, world_size=2, timeout=60, path=path, save=False):
        assert restored == {"batches": 3}
        assert step == 3


def save_aside(path):
    plugin = AsyncCheckpointIO()
    trainer = quiet_trainer(strategy(p=2), use_distributed_sampler=False, max_epochs=1)
    trainer.strategy.checkpoint_io = plugin
    trainer.fit(CallbackGPT(), datamodule=Batches())
    trainer.save_checkpoint(path)
    plugin.teardown()


def test_checkpoint_may_be_written_in_the_background(tmp_path):
    run_spmd(save_aside, world_size=2, timeout=60, path=str(tmp_path / "last.ckpt"))
    saved = read_checkpoint(tmp_path / "last.ckpt")
    assert list(saved["state_dict"]) == list(CallbackGPT().state_dict())


def summarize_twice():
    """What is printed by two Trainers of one module, and what a copy of the split module holds."""
    module, seen = CallbackGPT(), []
    for _ in range(2):
        SeenSummary.seen = None
        trainer = quiet_trainer(
            strategy(**T2P2), callbacks=[SeenSummary()], max_epochs=1, use_distributed_sampler=False
        )
        trainer.fit(module, datamodule=Batches())
        seen.append(SeenSummary.seen)
    copied = copy.deepcopy(module)
    same = all(torch.equal(a, b) for a, b in zip(copied.parameters(), module.parameters(), strict=True))
    return seen, same and sum(p.numel() for p in copied.parameters())


def test_second_trainer_of_a_split_module_shows_the_whole_too():
    results = run_spmd(summarize_twice, world_size=4, timeout=60)
    first, second = results[0][0]
    assert first == second
    assert first[0][1] == sum(p.numel() for p in CallbackGPT().parameters())
    module = CallbackGPT()
    cut = partition(module, 2)
    placement, _ = place(module, PLAN, 2)
    held = holdings(module, Layout(Topology(2, 2, 1), 2, cut, placement))
    # rank 0 is on the last stage; every stage's first tensor rank holds what the table says
    assert [each.local for each in held] == [results[2][1], results[0][1]]
    assert sum(each.whole for each in held) == first[0][1] + module.token.weight.numel()
