"""The rules of the house about who may import and call what, as data and as functions on one source file.

A *unit* is a module or package right below lightning_ptdp. Rules read source by `ast` and import nothing of ours.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

PACKAGE = "lightning_ptdp"


@dataclass(frozen=True, slots=True)
class Unit:
    """What one unit may import, besides itself and the standard library.

    layer: only units of lower layers may be listed in `ours`, except by the dotted name of a module.
    ours: units, or single modules as "unit.module". outside: top-level packages.
    """

    layer: int
    ours: frozenset[str]
    outside: frozenset[str]


def _unit(layer: int, ours: str = "", outside: str = "") -> Unit:
    return Unit(layer, frozenset(ours.split()), frozenset(outside.split()))


_PURE = "config topology schedule"
_COMPUTE = "comm kernels batch loss_weight outputs data_parallel tensor_parallel pipeline recompute deferred_init"
_FRONT = (
    f"engine checkpoint planner {_PURE} comm kernels batch exchange failure outputs precision loaders logging "
    "log_calls hook_logs metrics progress predictions stage_state stopping whole_module layout steps strategy check "
    "callbacks averages holdings loss_scale held_schedule parameter_groups pretrained preflight inventory refusals "
    "resumable resuming deferred_init recompute tensor_parallel.random"
)

UNITS: dict[str, Unit] = {
    "topology": _unit(0),
    "config": _unit(0, "topology.Topology"),  # derives d and m
    "schedule": _unit(0),
    "planner": _unit(1, _PURE, "yaml"),
    "kernels": _unit(1, "", "torch"),
    "comm": _unit(1, _PURE, "torch numpy"),
    "outputs": _unit(1, "", "torch numpy"),
    "batch": _unit(1, "", "torch"),
    "loss_scale": _unit(0),
    "held_schedule": _unit(1),
    "parameter_groups": _unit(1, "", "torch"),
    "loss_weight": _unit(2, "kernels", "torch"),
    "exchange": _unit(2, f"comm {_PURE}", "torch"),
    "failure": _unit(2, f"comm {_PURE}", "torch"),
    "preflight": _unit(2, "comm", "torch"),
    "probe": _unit(2, "kernels.status", "torch"),
    "tensor_parallel": _unit(2, f"comm kernels {_PURE}", "torch numpy"),
    "data_parallel": _unit(2, f"comm kernels {_PURE}", "torch"),
    "pipeline": _unit(2, f"comm {_PURE}", "torch"),
    "deferred_init": _unit(2, "tensor_parallel.random pipeline.hollow", "torch"),
    "recompute": _unit(2, "tensor_parallel.random", "torch numpy"),
    "checkpoint": _unit(3, f"comm tensor_parallel.shard {_PURE}", "torch safetensors xxhash"),
    "layout": _unit(3, f"pipeline recompute tensor_parallel {_PURE}", "torch"),
    "engine": _unit(3, f"{_PURE} {_COMPUTE}", "torch"),
    "precision": _unit(4, f"data_parallel.clip {_FRONT}", "torch lightning"),
    "loaders": _unit(4, f"data_parallel.sampler {_FRONT}", "torch lightning"),
    "resumable": _unit(4, f"data_parallel.order {_FRONT}", "torch lightning rich"),
    "resuming": _unit(4, _FRONT, "torch lightning"),
    "logging": _unit(4, _FRONT, "torch lightning torchmetrics"),
    "metrics": _unit(4, _FRONT, "torch lightning torchmetrics"),
    "log_calls": _unit(4, _FRONT, "torch lightning torchmetrics"),
    "hook_logs": _unit(4, _FRONT, "torch lightning torchmetrics"),
    "progress": _unit(4, _FRONT, "torch lightning"),
    "stage_state": _unit(4, _FRONT, "torch lightning numpy"),
    "predictions": _unit(4, f"data_parallel.sampler {_FRONT}", "torch lightning"),
    "whole_module": _unit(4, _FRONT, "torch lightning"),
    "callbacks": _unit(4, _FRONT, "torch lightning"),
    "averages": _unit(4, _FRONT, "torch lightning"),
    "pretrained": _unit(4, _FRONT, "torch"),
    "export": _unit(4, _FRONT, "torch lightning transformers"),
    "holdings": _unit(4, _FRONT, "torch"),
    "inventory": _unit(4, f"__init__ {_FRONT}", "torch lightning torchmetrics"),
    "refusals": _unit(4, f"probe {_FRONT}", "torch lightning"),
    "steps": _unit(4, _FRONT, "torch lightning"),
    "check": _unit(4, f"{_FRONT} pipeline.partition tensor_parallel.shard", "torch lightning numpy"),
    "stopping": _unit(4, _FRONT, "torch lightning"),
    "strategy": _unit(4, f"data_parallel.scaling {_FRONT}", "torch lightning"),
    "nn": _unit(2, "kernels", "torch"),
    "data": _unit(2, "", "torch lightning datasets tokenizers numpy rich"),
    "compat": _unit(3, "kernels nn", "torch"),
    "recipes": _unit(3, "nn data", "torch lightning torchmetrics transformers"),
    "cli": _unit(
        5,
        f"__init__ {_FRONT} export data recipes",
        "torch lightning jsonargparse rich matplotlib tokenizers transformers",
    ),
    "__main__": _unit(6, "cli"),
    "__init__": _unit(4, _FRONT, "lightning"),  # what users import; the rest imports from where a name is defined
}

# The units of layer 4 are one front end and may use each other.
SIDEWAYS_LAYERS = {4}

# Where environment variables are read.
ENVIRONMENT_READERS = {
    "kernels/build.py": "variables may steer a build",
    "loaders.py": "Lightning's own switch for seeding workers, which it would read with the wrong rank",
    "cli": "variables may steer what a terminal shows",
    "cli.py": "the same",
}

GROUP_MAKERS = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh"}

COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "P2POp"),
    *("recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("reduce_scatter_single", "scatter_object_list", "send", "send_object_list"),
}

COLLECTIVE_MODULES = ("torch.distributed.nn", "torch.distributed._functional_collectives")
DTENSOR_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed.checkpoint")


@dataclass(frozen=True)
class Source:
    """One source file. path: relative to the checkout, with recipes where an install puts them."""

    path: PurePosixPath
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @property
    def package(self) -> tuple[str, ...]:
        """The dotted name of the package that holds the file, in parts."""
        return self.path.parts[:-1]

    @property
    def unit(self) -> str:
        """The unit that the file belongs to."""
        return PurePosixPath(self.path.parts[1]).stem

    def is_in(self, *paths: str) -> bool:
        """Whether the file is one of these files, or in one of these folders, below the package."""
        return any(self.path.is_relative_to(PurePosixPath(PACKAGE, path)) for path in paths)

    @cached_property
    def imports(self) -> list["Import"]:
        """Every name that the file imports, wherever in the file it does."""
        found: list[Import] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [
                    Import(node.lineno, alias.name, alias.asname or alias.name, bool(alias.asname))
                    for alias in node.names
                ]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found += [
                    Import(node.lineno, f"{base}.{alias.name}", alias.asname or alias.name, True)
                    for alias in node.names
                ]
        return found

    @cached_property
    def references(self) -> list["Reference"]:
        """Every dotted name that the file uses, with local names replaced by what they were imported as."""
        meaning = {item.local: item.target for item in self.imports if item.binds_target}
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Attribute | ast.Name) and (name := _dotted(node)):
                head, dot, rest = name.partition(".")
                found.append(Reference(node.lineno, meaning.get(head, head) + dot + rest, node))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        above = self.package[: len(self.package) - node.level + 1] if node.level else ()
        return ".".join([*above, *([node.module] if node.module else [])])


@dataclass(frozen=True, slots=True)
class Import:
    """`target` becomes known as `local`; a plain `import a.b` binds only a, so `binds_target` is false."""

    line: int
    target: str
    local: str
    binds_target: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A use of a dotted name."""

    line: int
    name: str
    node: ast.expr


Rule = Callable[[Source], Iterator[str]]


def violations(path: str, text: str) -> list[str]:
    """What one file of the package does against the rules, as `path:line: rule`; path as in an install."""
    source = Source(PurePosixPath(path), text)
    return [f"{path}:{finding}" for rule in RULES for finding in rule(source)]


def imports_follow_the_layers(source: Source) -> Iterator[str]:
    """A unit imports what its row of UNITS lists."""
    if source.unit not in UNITS:
        yield f"1: unit {source.unit!r} is in no layer; give it a row in tests/architecture.py"
        return
    allowed = UNITS[source.unit]
    for item in source.imports:
        top, _, below = item.target.partition(".")
        if top == PACKAGE:
            name = below if below.partition(".")[0] in UNITS else "__init__"
            fine = _is_below(name, (source.unit, *allowed.ours))
            layers = f"units {_listed(allowed.ours)} of ours"
        else:
            fine = top in sys.stdlib_module_names or top in allowed.outside
            layers = f"packages {_listed(allowed.outside)}"
        if not fine:
            yield f"{item.line}: {source.unit} (layer {allowed.layer}) may import {layers}, not {item.target}"


def groups_are_made_in_one_place(source: Source) -> Iterator[str]:
    """Only comm/groups.py makes process groups."""
    if source.is_in("comm/groups.py"):
        return
    for line, name in _names(source):
        if name.rpartition(".")[2] in GROUP_MAKERS and name.startswith("torch."):
            yield f"{line}: process groups are made in comm/groups.py only; take {name} from Groups as an argument"


def collectives_are_called_in_comm(source: Source) -> Iterator[str]:
    """Only comm/ calls torch's collectives."""
    if source.is_in("comm"):
        return
    for line, name in _names(source):
        base, _, last = name.rpartition(".")
        is_collective = base in ("torch.distributed", "torch.distributed.distributed_c10d") and last in COLLECTIVES
        if is_collective or _is_below(name, COLLECTIVE_MODULES):
            yield f"{line}: collectives are called in comm/ only; give {name} a function there"


def dtensor_stays_in_checkpoint(source: Source) -> Iterator[str]:
    """Only checkpoint/ knows DTensor and DCP."""
    if source.is_in("checkpoint"):
        return
    for line, name in _names(source):
        if name.rpartition(".")[2] == "DTensor" or _is_below(name, DTENSOR_MODULES):
            yield f"{line}: DTensor and DCP are for checkpoint/ only, compute uses plain tensors; found {name}"


def environment_steers_no_run(source: Source) -> Iterator[str]:
    """Only a build and the command line read environment variables; setting one for others is not reading."""
    if source.is_in(*ENVIRONMENT_READERS):
        return
    written = {
        id(node.value)
        for node in source.nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    for use in source.references:
        if use.name in ("os.environ", "os.getenv", "os.environb") and id(use.node) not in written:
            yield f"{use.line}: no environment variable changes what runs, so {use.name} is not read; take an argument"


def only_the_command_line_prints(source: Source) -> Iterator[str]:
    """Only what talks to a terminal calls print."""
    if source.is_in("cli", "cli.py", "__main__.py", "planner/__main__.py"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _dotted(node.func) == "print":
            yield f"{node.lineno}: a library logs, print is for the command line; use logging.getLogger(__name__)"


def apex_is_not_imported(source: Source) -> Iterator[str]:
    """The apex on PyPI is another project, so the name says nothing."""
    for item in source.imports:
        if _is_below(item.target, ("apex",)):
            yield f"{item.line}: apex on PyPI is not NVIDIA's; recognise it by what it contains, in compat/"


def source_is_ascii(source: Source) -> Iterator[str]:
    """Source is ASCII: what looks alike is alike."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if not line.isascii():
            strange = next(letter for letter in line if not letter.isascii())
            yield f"{number}: source is ASCII; found U+{ord(strange):04X}; spell it, or write it as an escape"


RULES: tuple[Rule, ...] = (
    imports_follow_the_layers,
    groups_are_made_in_one_place,
    collectives_are_called_in_comm,
    dtensor_stays_in_checkpoint,
    environment_steers_no_run,
    only_the_command_line_prints,
    apex_is_not_imported,
    source_is_ascii,
)


def _names(source: Source) -> set[tuple[int, str]]:
    imported = {(item.line, item.target) for item in source.imports}
    return imported | {(use.line, use.name) for use in source.references}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _is_below(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
