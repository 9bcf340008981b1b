"""`ptdp check`, which runs the first batch of a configuration in one process and as the layout splits it."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from lightning_ptdp.check.checking import ONE_PROCESS, check_layout
from lightning_ptdp.check.report import Report
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.strategy import PTDPStrategy

from .main import COMMANDS, with_underscores
from .terminal import say
from .trainer import with_recipe_paths

SIZES = {
    "tensor_parallel_size": "ranks that share each matrix",
    "pipeline_parallel_size": "ranks that share the layers",
    "data_parallel_size": "replicas, which share the first batch of the loader; 1 where the configuration says auto",
    "virtual_pipeline_size": "chunks of layers a pipeline rank holds",
    "micro_batch_size": "samples a microbatch",
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "own": None}

# A check needs one process and one batch, whatever the configuration trains on.
ONE_BATCH: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "precision": "32-true",
    "plugins": None,
    "logger": False,
    "profiler": None,
    "max_steps": 1,
    "max_epochs": None,
    "min_steps": None,
    "min_epochs": None,
    "max_time": None,
    "fast_dev_run": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "sync_batchnorm": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class BatchChecked(Exception):  # noqa: N818  a success is told, too
    """Raised to end a run before its first step; carries the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class CheckBatch(Callback):
    """Checks the first batch of training, and ends the run by `BatchChecked`."""

    def __init__(self, config: ParallelConfig, *, dtype: torch.dtype | None, tolerance: float | None) -> None:
        self._config, self._dtype, self._tolerance = config, dtype, tolerance

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        dtype, tolerance = self._dtype, self._tolerance
        raise BatchChecked(check_layout(pl_module, batch, self._config, dtype=dtype, tolerance=tolerance))


class CheckCommand(LightningCLI):
    """LightningCLI without subcommands, whose Trainer has one process and takes one batch."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, meaning in SIZES.items():
            parser.add_argument(f"--{name}", type=int | None, help=f"{meaning}; overrides the strategy's")
        parser.add_argument(
            "--dtype",
            type=Literal["float64", "float32", "own"],
            default="float64",
            help="of the comparison; own keeps the module's",
        )
        parser.add_argument(
            "--tolerance", type=float | None, help="relative; by default 1e-6 in float64, 1e-3 in float32"
        )
        for name in ("ckpt_path", "weights_only"):
            parser.add_argument(f"--{name}", help="of fit, in configurations that it wrote; a check does without")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list), "run() passes a list"
        self.config = parser.parse_args(args)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        dtype, tolerance = DTYPES[self.config["dtype"]], self.config["tolerance"]
        check = CheckBatch(self._wanted(), dtype=dtype, tolerance=tolerance)
        return super().instantiate_trainer(**kwargs, **ONE_BATCH, callbacks=[check])

    def _wanted(self) -> ParallelConfig:
        """Read the configuration's strategy, and change what the options of the command say."""
        strategy = self.config_init["trainer"]["strategy"]
        strategy = PTDPStrategy() if strategy == "ptdp" else strategy
        config = strategy.config if isinstance(strategy, PTDPStrategy) else ONE_PROCESS
        given = {name: self.config[name] for name in SIZES if self.config[name] is not None}
        config = replace(config, **given)
        return replace(config, data_parallel_size=1) if config.data_parallel_size == "auto" else config


def run(arguments: Sequence[str]) -> int:
    """Check what the arguments configure; returns 0 if the layout computes what one process computes, else 1."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|lightning)\.")
    command = CheckCommand(
        args=with_recipe_paths(with_underscores(arguments)),
        run=False,
        save_config_callback=None,
        parser_kwargs={"prog": "ptdp check", "description": f"{COMMANDS['check'].summary.capitalize()}."},
    )
    try:
        command.trainer.fit(command.model, datamodule=command.datamodule)
    except BatchChecked as found:
        say(str(found.report))
        return 0 if found.report.ok else 1
    except ValueError as error:
        say(f"ptdp check: {error}", error=True)
        return 1
    say("ptdp check: the training loader gave no batch", error=True)
    return 1
