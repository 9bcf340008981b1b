"""Finds the model's blocks: the list of like modules that a pipeline cuts."""

from __future__ import annotations

from torch import nn

BlockList = nn.ModuleList | nn.ModuleDict | nn.Sequential


def find_blocks(module: nn.Module, name: str | None = None) -> str:
    """Find the name of the block list: the `nn.ModuleList` that holds most parameters, or the list called `name`.

    If there is no list of two or more modules, an `nn.ModuleDict` counts, and then an `nn.Sequential`.

    Raises:
        ValueError: there is no such list, or `name` is not a list of at least one module.
    """
    if name is not None:
        return _named(module, name)
    for kind in (nn.ModuleList, nn.ModuleDict, nn.Sequential):
        candidates: dict[str, int] = {
            path: sum(parameter.numel() for parameter in child.parameters())
            for path, child in module.named_modules()
            if path and isinstance(child, kind) and len(child) >= 2
        }
        best = max(candidates, key=lambda path: candidates[path], default=None)
        if best is not None and candidates[best] > 0:
            return best
    raise ValueError(
        "pipeline parallelism cuts a list of blocks, and the module holds no nn.ModuleList (nor nn.ModuleDict, "
        f"nn.Sequential) of two or more modules with parameters; it holds {_children(module)}; use "
        "pipeline_parallel_size=1, or put the layers into an nn.ModuleList"
    )


def _named(module: nn.Module, name: str) -> str:
    lists = [path for path, child in module.named_modules() if path and isinstance(child, BlockList)]
    if name not in lists:
        raise ValueError(
            f"pipeline_blocks={name!r} is not an nn.ModuleList, nn.ModuleDict or nn.Sequential of the module; it has "
            f"{', '.join(map(repr, lists)) or 'none'}"
        )
    return name


def _children(module: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children()) or "no modules"
