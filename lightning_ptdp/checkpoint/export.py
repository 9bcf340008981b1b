"""Turns a checkpoint, in one process, into one ordinary file or into a folder of Hugging Face's form."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ptdp.checkpoint import complete_or_absent
from lightning_ptdp.checkpoint.checked_files import faults_of
from lightning_ptdp.checkpoint.contents import plain_checkpoint
from lightning_ptdp.checkpoint.folder import Folder, Keys, Stored
from lightning_ptdp.checkpoint.pretrained import models_of
from lightning_ptdp.checkpoint.reading import check_exists, contents, names_of, read_checkpoint
from lightning_ptdp.checkpoint.rectangles import Location
from lightning_ptdp.checkpoint.single import placeholders, write_file

Tensors = Iterable[tuple[Keys, Tensor]]
Track = Callable[[Tensors, int], Tensors]
"""Hands on tensors, and may show how many of so many are done."""

_OF_A_RUN = ("optimizer_states", "lr_schedulers", "callbacks")  # what Lightning's save_weights_only leaves out


def untracked(tensors: Tensors, _count: int) -> Tensors:
    """Show nothing."""
    return tensors


def to_file(
    source: Path,
    target: Path,
    *,
    weights_only: bool = False,
    trusted: bool = False,
    force: bool = False,
    track: Track = untracked,
) -> None:
    """Make one ordinary Lightning checkpoint of a folder or a file; one tensor of a folder is in memory at a time.

    Args:
        source: the checkpoint.
        target: path of the file.
        weights_only: whether to leave out optimizers, schedulers and callbacks.
        trusted: whether the checkpoint may hold objects of any class, whose code runs when it is read.
        force: whether to replace what is at the target.
        track: may show how many tensors are done.

    Raises:
        FileNotFoundError, FileExistsError: the source is missing, or the target is there.
        ValueError: the source is no checkpoint, or holds objects and is not trusted.
        RuntimeError: a file of the source is missing or damaged.
    """
    check_exists(source)
    check_free(target, source, force=force)
    if source.is_file():
        checkpoint = read_safely(lambda: read_checkpoint(source, weights_only=not trusted), source)
        _save(target, _without_run(checkpoint) if weights_only else checkpoint)
        return
    check_undamaged(source)
    folder = Folder(source)
    stored, objects = contents(folder, optimizers=not weights_only)
    rest = read_safely(lambda: folder.meta(weights_only=not trusted), source)
    values = placeholders(stored)
    checkpoint = plain_checkpoint(
        _without_run(rest) if weights_only else rest, names_of(folder), {**values, **folder.read({}, objects)}
    )
    write_file(target, checkpoint, values, track(_one_by_one(folder, stored), len(stored)))


def to_hugging_face(
    source: Path,
    target: Path,
    make: Callable[[], nn.Module],
    *,
    tokenizer: Any = None,
    max_shard_size: str = "5GB",
    trusted: bool = False,
    force: bool = False,
    track: Track = untracked,
) -> None:
    """Save a checkpoint's Hugging Face model as a folder that `from_pretrained` loads.

    The model is the only one of transformers in the module, or what the module's method `to_hugging_face` returns.

    Args:
        source: the checkpoint.
        target: path of the folder.
        make: the LightningModule's class, which is given the checkpoint's hyper-parameters, or a function that returns
            the module.
        tokenizer: of transformers, saved beside the model.
        max_shard_size: size of a file of weights at most, such as "5GB".
        trusted: whether the checkpoint may hold objects of any class, whose code runs when it is read.
        force: whether to replace what is at the target.
        track: may show how many tensors are done.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError, FileExistsError: the source is missing, or the target is there.
        ValueError: the source is no checkpoint, or the module cannot be made or has no model to save.
        RuntimeError: a file of the source is missing or damaged, or the weights do not fit the module.
    """
    check_transformers()
    check_exists(source)
    check_free(target, source, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        file = source
        if source.is_dir():
            file = Path(scratch) / "weights.ckpt"
            to_file(source, file, weights_only=True, trusted=trusted, track=track)
        model = model_of(_load(make, file, trusted=trusted))
    if tokenizer is not None:
        _know_special_tokens(model, tokenizer)
    folder = complete_or_absent.prepare(target)
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except BaseException:
        complete_or_absent.remove(folder)
        raise
    complete_or_absent.put_in_place(target)


def model_of(module: nn.Module) -> Any:
    """Find the Hugging Face model that a module holds, or let its method `to_hugging_face` make it.

    Raises:
        ValueError: there is none, or there are several.
    """
    convert = getattr(module, "to_hugging_face", None)
    if convert is not None:
        return convert()
    models = models_of(module)
    if len(models) != 1:
        raise ValueError(
            f"{type(module).__name__} must hold one model of transformers to be exported as such, and holds "
            f"{sorted(models) or 'none'}; give it a method to_hugging_face that returns a model of transformers with "
            "its weights, or export to a file"
        )
    return next(iter(models.values()))


def check_transformers() -> None:
    """Raise ImportError if transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError("Hugging Face models need transformers; pip install 'lightning_ptdp[hf]'") from error


def check_free(target: Path, source: Path, *, force: bool) -> None:
    """Raise FileExistsError if something is at the target and must stay."""
    if target.exists() and target.samefile(source):
        raise FileExistsError(f"{target} is the checkpoint itself; choose another place")
    if target.exists() and not force:
        raise FileExistsError(f"{target} exists; choose another place, or replace it with --force")


def check_undamaged(folder: Path) -> None:
    """Compare the size of each file of a checkpoint with its manifest; contents are compared as they are read.

    Raises:
        RuntimeError: with what is wrong.
    """
    faults = faults_of(complete_or_absent.files(folder), contents=False)
    if faults:
        raise RuntimeError("; ".join(faults))


def _one_by_one(folder: Folder, stored: dict[Keys, Stored]) -> Iterator[tuple[Keys, Tensor]]:
    for keys, found in stored.items():
        tensor = torch.empty(found.size, dtype=found.dtype)
        folder.read({keys: Location.whole(found.size).of(tensor)})
        yield keys, tensor


def _without_run(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in checkpoint.items() if key not in _OF_A_RUN}


def read_safely(read: Callable[[], dict[str, Any]], source: Path) -> dict[str, Any]:
    """Read a part of a checkpoint.

    Raises:
        ValueError: it holds objects, and the reader takes none.
    """
    try:
        return read()
    except UnpicklingError as error:
        raise ValueError(
            f"{source} holds objects of classes that reading would run code of; if you trust where it comes from, pass "
            f"--trusted ({str(error).splitlines()[0]})"
        ) from error


def _save(target: Path, checkpoint: dict[str, Any]) -> None:
    with complete_or_absent.complete_file(target) as aside:
        torch.save(checkpoint, aside)


def _load(make: Callable[[], nn.Module], file: Path, *, trusted: bool) -> nn.Module:
    """Make the module, with the checkpoint's weights in their own precision."""
    checkpoint = read_safely(lambda: read_checkpoint(file, optimizers=False, weights_only=not trusted), file)
    module = _made(make, file, checkpoint, trusted=trusted)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            stored = checkpoint["state_dict"].get(name)
            if stored is not None and stored.dtype != tensor.dtype:
                tensor.data = stored.clone()
    return module


def _made(make: Callable[[], nn.Module], file: Path, checkpoint: dict[str, Any], *, trusted: bool) -> nn.Module:
    if isinstance(make, type) and issubclass(make, pl.LightningModule):
        try:
            return make.load_from_checkpoint(file, map_location="cpu", weights_only=not trusted)
        except TypeError as error:
            raise ValueError(
                f"{make.__name__} cannot be made of the checkpoint's hyper-parameters "
                f"{sorted(checkpoint.get('hyper_parameters', {}))}: {error}; name a function that returns the module"
            ) from error
    module = make()
    if not isinstance(module, pl.LightningModule):
        raise ValueError(f"a checkpoint is loaded into a LightningModule; {make} returned a {type(module).__name__}")
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    return module


def _know_special_tokens(model: Any, tokenizer: Any) -> None:
    """Tell the model the numbers of special tokens that generation needs, if it does not know them."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for config in (model.config, model.generation_config):
            if config is not None and getattr(config, name) is None:
                setattr(config, name, getattr(tokenizer, name))
