"""`ptdp export`, which turns a checkpoint into one ordinary file, or into a folder of Hugging Face's form."""

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer
from torch import nn

from lightning_ptdp.checkpoint.export import Tensors, check_transformers, read_safely, to_file, to_hugging_face
from lightning_ptdp.checkpoint.reading import read_rest
from lightning_ptdp.data import TextDataModule
from lightning_ptdp.data.tokenizer import END_OF_TEXT

from .main import COMMANDS, with_underscores
from .terminal import say

GPT_RECIPE = "lightning_ptdp.recipes.gpt.GPTModule"


def run(arguments: Sequence[str]) -> int:
    """Export what the arguments name; returns the exit status."""
    options = _parser().parse_args(with_underscores(arguments))
    try:
        export(options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        say(f"ptdp export: {error}", error=True)
        return 1
    say(f"written: {options.out}")
    return 0


def export(options: Namespace) -> None:
    """Export what parsed options say."""
    source, target = Path(options.ckpt), Path(options.out)
    usual: dict[str, Any] = {"trusted": options.trusted, "force": options.force, "track": _track}
    if options.to == "file":
        to_file(source, target, weights_only=options.weights_only, **usual)
        return
    check_transformers()
    to_hugging_face(
        source,
        target,
        find_module(options.module),
        tokenizer=tokenizer_for(source, options.tokenizer, trusted=options.trusted),
        max_shard_size=options.max_shard_size,
        **usual,
    )


def find_module(path: str) -> Callable[[], nn.Module]:
    """Import a class or function by its dotted path.

    Raises:
        ValueError: there is none.
    """
    name, _, attribute = path.rpartition(".")
    try:
        found = getattr(import_module(name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--module names a LightningModule's class, or a function that returns the module, as package.file.Name; "
            f"{path} is not found: {error}; a file in this folder is found with PYTHONPATH=."
        ) from error
    if not callable(found) or inspect.ismodule(found):
        raise ValueError(f"--module names a class or a function; {path} is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def tokenizer_for(source: Path, given: str | None, *, trusted: bool) -> Any:
    """Find the tokenizer that goes with the exported model.

    Args:
        source: the checkpoint.
        given: a tokenizer's folder or tokenizer.json that the user names, if any.
        trusted: whether the checkpoint may be read in a way that runs code which it names.

    Returns:
        A tokenizer of transformers: the given one, else that of TextDataModule in the checkpoint, else None.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if given is not None and Path(given).is_dir():
        return AutoTokenizer.from_pretrained(given)
    if given is not None:
        return _fast(PreTrainedTokenizerFast, Tokenizer.from_str(Path(given).read_text()))
    rest = read_safely(lambda: read_rest(source, weights_only=not trusted), source)
    state = rest.get(TextDataModule.__qualname__, {})
    return _fast(PreTrainedTokenizerFast, Tokenizer.from_str(state["tokenizer"])) if state else None


def _fast(kind: Any, tokenizer: Tokenizer) -> Any:
    ends = END_OF_TEXT if tokenizer.token_to_id(END_OF_TEXT) is not None else None
    return kind(tokenizer_object=tokenizer, bos_token=ends, eos_token=ends)


def _track(tensors: Tensors, count: int) -> Tensors:
    """Show a bar on a terminal."""
    console = Console(file=sys.stderr)
    return track(tensors, total=count, description="exporting", console=console, disable=not console.is_terminal)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="ptdp export", description=f"{COMMANDS['export'].summary.capitalize()}.")
    parser.add_argument("ckpt", metavar="CKPT", help="a checkpoint, folder or file")
    parser.add_argument("out", metavar="OUT", help="where to write")
    parser.add_argument(
        "--to",
        type=Literal["file", "hf"],
        default="file",
        help="file: one ordinary Lightning checkpoint; hf: a folder of safetensors, config and tokenizer",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT")
    parser.add_argument(
        "--trusted", action="store_true", help="read objects of any class in CKPT, which runs code that it names"
    )
    parser.add_argument(
        "--weights_only", action="store_true", help="to a file: leave out optimizers, schedulers and callbacks"
    )
    parser.add_argument(
        "--module",
        type=str,
        default=GPT_RECIPE,
        help="to hf: the LightningModule's class, or a function that returns the module, as package.file.Name",
    )
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        help="to hf: a tokenizer's folder, or a tokenizer.json; by default the one in CKPT, if it has one",
    )
    parser.add_argument("--max_shard_size", type=str, default="5GB", help="to hf: the size of a file at most")
    return parser
