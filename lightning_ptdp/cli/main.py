"""The command `ptdp`: one table of subcommands, each a plain function whose signature and docstring are its options."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser
from lightning.fabric.utilities.rank_zero import rank_zero_only

from .terminal import say


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        summary: what the overview says of it.
        target: the function behind it, as "module:name".
        parses_itself: whether the function takes the list of arguments and returns the exit status. If not, its
            parameters are the options.
    """

    summary: str
    target: str
    parses_itself: bool = False


TRAINER_COMMANDS = {
    "fit": "train a model",
    "validate": "run its validation",
    "test": "run its test",
    "predict": "run its prediction",
}
COMMANDS = {
    "check": Command(
        "tell whether a layout computes what one process computes", "lightning_ptdp.cli.check:run", parses_itself=True
    ),
    "export": Command(
        "turn a checkpoint into one file, or into a model of transformers",
        "lightning_ptdp.cli.export:run",
        parses_itself=True,
    ),
    "generate": Command("continue a text with a trained recipe", "lightning_ptdp.cli.generate:generate"),
    "data": Command("prepare a corpus and count it", "lightning_ptdp.cli.corpus:prepare_corpus"),
    "kernels": Command("say which kernels are compiled", "lightning_ptdp.cli.kernels:show_kernels"),
    "doctor": Command("say what this machine has", "lightning_ptdp.cli.kernels:diagnose"),
    "recipes": Command("list the bundled configurations", "lightning_ptdp.cli.recipes:list_recipes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ptdp` with the given arguments, those of the process by default; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    start_logging()
    if not arguments or arguments[0] in {"-h", "--help"}:
        say(overview())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in TRAINER_COMMANDS:
        import_module("lightning_ptdp.cli.trainer").run(name, rest)
        return 0
    if name in COMMANDS:
        return run_command(name, rest)
    say(f"ptdp: no command {name!r}; there are {', '.join([*TRAINER_COMMANDS, *COMMANDS])}", error=True)
    return 2


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Parse the arguments by the signature of the command's function, and call it."""
    module, function_name = COMMANDS[name].target.split(":")
    function: Callable[..., Any] = getattr(import_module(module), function_name)
    if COMMANDS[name].parses_itself:
        status: int = function(arguments)
        return status
    parser = ArgumentParser(prog=f"ptdp {name}", description=f"{COMMANDS[name].summary.capitalize()}.")
    parser.add_argument("--config", action="config", help="a YAML file with values for the options below")
    parser.add_function_arguments(function, as_group=False)
    values: dict[str, Any] = parser.parse_args(with_underscores(arguments)).as_dict()
    values.pop("config")
    try:
        function(**values)
    except (OSError, ValueError, RuntimeError) as error:
        say(f"ptdp {name}: {error}", error=True)
        return 1
    return 0


def with_underscores(arguments: Sequence[str]) -> list[str]:
    """Spell options as the functions do: --top-k=4 and --top_k=4 are the same."""
    return [_with_underscores(argument) if argument.startswith("--") else argument for argument in arguments]


def overview() -> str:
    """Write what `ptdp` says when it's asked for nothing: its commands."""
    lines = [f"  {name:<10} {summary}" for name, summary in TRAINER_COMMANDS.items()]
    lines += [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "ptdp trains ordinary LightningModules under tensor x pipeline x data parallelism.",
            "",
            "usage: ptdp COMMAND [options], or ptdp COMMAND --help",
            "",
            *lines,
            "",
            "start:   ptdp fit --config gpt/tiny",
            "options: fit, validate, test and predict are LightningCLI; a bundled recipe may be given by name",
        ]
    )


def start_logging() -> None:
    """Show the package's messages on standard error: all of them on global rank 0, warnings on the others."""
    logger = logging.getLogger("lightning_ptdp")
    logger.setLevel(logging.INFO if getattr(rank_zero_only, "rank", 0) == 0 else logging.WARNING)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ptdp: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _with_underscores(option: str) -> str:
    name, equals, value = option[2:].partition("=")
    return "--" + name.replace("-", "_") + equals + value
