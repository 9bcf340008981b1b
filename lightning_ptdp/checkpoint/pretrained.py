"""Weights of a Hugging Face model for a module that is split: each rank reads what it holds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_ptdp.checkpoint.local_state import LocalState
from lightning_ptdp.checkpoint.safetensors_files import SafetensorsFiles, is_safetensors
from lightning_ptdp.checkpoint.saving import together
from lightning_ptdp.comm.collectives import gather_objects

log = logging.getLogger(__name__)


def is_pretrained(path: str, world: ProcessGroup) -> bool:
    """Whether a path leads to safetensors on any rank; every rank calls it."""
    return any(gather_objects(is_safetensors(path), world))


def models_of(module: nn.Module) -> dict[str, nn.Module]:
    """The models of transformers in a module, by name; parts of such a model are not listed."""
    modeling = sys.modules.get("transformers.modeling_utils")
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        is_model = modeling is not None and isinstance(part, modeling.PreTrainedModel)
        if is_model and not any(not outer or name.startswith(f"{outer}.") for outer in found):
            found[name] = part
    return found


def read_pretrained(
    path: str, module: nn.Module, local: LocalState, aliases: Mapping[str, Sequence[str]], world: ProcessGroup
) -> dict[str, Any]:
    """Fill this rank's tensors of the module's only Hugging Face model; every rank of the world calls it.

    Args:
        path: of a safetensors file, or of a folder of them.
        module: split. Without a Hugging Face model in it, the files have to have the module's own names.
        local: where what this rank holds lies in the whole.
        aliases: for each parameter name of the plain module, all names of the same parameter.
        world: the group of all ranks.

    Returns:
        The module's state, without what the files have no tensor for; what is not of the model is as it was.

    Raises:
        RuntimeError: on every rank, when a file is missing or damaged, names or a size differ, or several models are
            there.
    """
    state: dict[str, Any] = dict(module.state_dict())
    missing: list[str] = []

    def act() -> None:
        prefix, base = _names_of_model(module)
        files = SafetensorsFiles(path)
        of_model = [name for name in local.names if name.startswith(prefix)]
        stored_as = {
            name: _stored_name([n.removeprefix(prefix) for n in aliases.get(name, (name,))], base, files.file_of)
            for name in of_model
        }
        missing.extend(name for name, stored in stored_as.items() if stored is None)
        wanted = []
        for name, stored in stored_as.items():
            held = [alias for alias in aliases.get(name, (name,)) if alias in state]
            if stored is not None and held[:1] == [name]:
                wanted.append((stored, local.location(name, state[name].shape).of(state[name])))
        unused = sorted(set(files.file_of) - set(stored_as.values()))
        if missing and unused:
            raise RuntimeError(
                f"the files have no {missing[:8]}, and the module no place for {unused[:8]}: they are of another "
                "model, or of one whose tensors transformers puts together as it reads; let the module build it by "
                "from_pretrained"
            )
        num_bytes = files.read(wanted)
        log.info("pretrained: %s, %.1f MB read by rank %d", path, num_bytes / 1e6, world.rank())
        if unused and world.rank() == 0:
            log.warning("pretrained: the module has no place for %d tensors of %s: %s", len(unused), path, unused[:8])

    with torch.no_grad():
        together(act, world, f"loading the pretrained weights {path} failed")
    return {name: value for name, value in state.items() if name not in missing}


def _names_of_model(module: nn.Module) -> tuple[str, str]:
    """Prefixes of the model's names: in the module, and in files of a model that has it as its base."""
    models = models_of(module)
    if len(models) > 1:
        raise ValueError(
            f"a folder of safetensors is loaded into a module with one model of transformers; this one has "
            f"{sorted(models)}; load them by from_pretrained where the module builds them"
        )
    for name, model in models.items():
        return f"{name}." if name else "", f"{model.base_model_prefix}."
    return "", ""


def _stored_name(names: Iterable[str], base: str, stored: Mapping[str, Any]) -> str | None:
    """Find a tensor of these names in files, whose names may begin with the base model's, or may leave it out."""
    candidates = [other for name in names for other in (name, base + name, name.removeprefix(base))]
    return next((name for name in candidates if name in stored), None)
