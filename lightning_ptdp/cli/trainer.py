"""`ptdp fit | validate | test | predict`, which are LightningCLI, with bundled recipes by name and a log of phases."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from .phases import Phases
from .recipes import recipe_path


class TrainerCommand(LightningCLI):
    """LightningCLI that takes any LightningModule and LightningDataModule, by class path, and logs its phases."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments given, which are those of the process with recipes replaced by their paths."""
        assert isinstance(args, list), "run() passes a list"
        self.config = parser.parse_args(args)


def run(command: str, arguments: Sequence[str]) -> None:
    """Run one of LightningCLI's subcommands with its arguments."""
    # a batch of packed tokens is a copy out of mapped memory, which no loader process can speed up
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # what Lightning still calls in torch, and torch in itself, is not the user's to change
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|lightning)\.")
    TrainerCommand(
        args=[command, *with_recipe_paths(arguments)],
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [Phases()]},
        parser_kwargs={"prog": "ptdp"},
    )


def with_recipe_paths(arguments: Sequence[str]) -> list[str]:
    """Replace the name of a bundled recipe after --config or -c by the path of its file; a file's own path stays."""
    replaced: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option == "--config" and equals:
            replaced.append(f"--config={_path_of(value)}")
        else:
            replaced.append(_path_of(argument) if replaced and replaced[-1] in {"--config", "-c"} else argument)
    return replaced


def _path_of(name: str) -> str:
    bundled = recipe_path(name)
    return name if Path(name).exists() or bundled is None else str(bundled)
