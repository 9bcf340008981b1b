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
    """A subcommand of `ptdp`.

    Attributes:
        summary: what the overview says of it.
        target: the function behind it, as "module:name". Its signature and docstring are the options.
        parses_itself: whether the function takes the list of arguments instead, and returns the exit status.
        made_of: a class, as "module:name", whose signature is the options instead; the function takes an instance.
        without: arguments of that class that are no options.
    """

    summary: str
    target: str
    parses_itself: bool = False
    made_of: str | None = None
    without: frozenset[str] = frozenset()


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
    "data": Command(
        "prepare a corpus and count it",
        "lightning_ptdp.cli.corpus:prepare_corpus",
        made_of="lightning_ptdp.data:TextDataModule",
        without=frozenset({"batch_size", "num_workers", "seed"}),
    ),
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
    """Parse the arguments by the signature of the command's function or class, and call the function."""
    command = COMMANDS[name]
    function = _found(command.target)
    if command.parses_itself:
        status: int = function(arguments)
        return status
    parser = ArgumentParser(prog=f"ptdp {name}", description=f"{command.summary.capitalize()}.")
    parser.add_argument("--config", action="config", help="a YAML file with values for the options below")
    made_of = None if command.made_of is None else _found(command.made_of)
    if made_of is None:
        parser.add_function_arguments(function, as_group=False)
    else:
        parser.add_class_arguments(made_of, as_group=False, skip=set(command.without))
    values: dict[str, Any] = parser.parse_args(with_underscores(arguments)).as_dict()
    values.pop("config")
    try:
        function(**values) if made_of is None else function(made_of(**values))
    except (OSError, ValueError, RuntimeError) as error:
        say(f"ptdp {name}: {error}", error=True)
        return 1
    return 0


def _found(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


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
