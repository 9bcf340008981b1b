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

    layer: only units of lower layers may be listed in `ours`. ours: units, or single modules as "unit.module".
    outside: top-level packages.
    """

    layer: int
    ours: frozenset[str]
    outside: frozenset[str]


def _unit(layer: int, ours: str = "", outside: str = "") -> Unit:
    return Unit(layer, frozenset(ours.split()), frozenset(outside.split()))


UNITS: dict[str, Unit] = {
    "topology": _unit(0),
    "names": _unit(0),
    "own_class": _unit(0),
    "host": _unit(0, "", "torch lightning torchmetrics"),  # its files know one of them each, and torch
    "schedule": _unit(0),
    "generators": _unit(0, "", "torch numpy"),
    "kernels": _unit(0, "", "torch"),
    "data": _unit(1, "names", "torch lightning datasets tokenizers numpy rich"),
    "config": _unit(1, "topology"),  # derives d and m
    "regions": _unit(1, "host.torch", "torch"),
    "comm": _unit(1, "generators topology", "torch"),
    "nn": _unit(1, "kernels", "torch"),
    "compat": _unit(2, "kernels nn", "torch"),
    "recipes": _unit(2, "nn data", "torch lightning torchmetrics transformers"),
    "random_streams": _unit(2, "comm generators", "torch numpy"),
    "data_parallel": _unit(2, "comm host.torch kernels own_class", "torch"),
    "pipeline": _unit(2, "comm host.torch names own_class schedule", "torch"),
    "tensor_parallel": _unit(3, "comm host.torch kernels names own_class random_streams", "torch numpy"),
    "deferred_init": _unit(3, "generators host.torch names pipeline random_streams regions", "torch"),
    "recompute": _unit(3, "generators host.torch names own_class regions", "torch"),
    "loaders": _unit(3, "comm generators host", "torch lightning rich"),
    "precision": _unit(3, "data_parallel host own_class", "torch lightning"),
    "layout": _unit(4, "config pipeline recompute schedule tensor_parallel topology", "torch"),
    "engine": _unit(
        5,
        "comm config data_parallel deferred_init host.torch kernels layout pipeline random_streams recompute schedule "
        "tensor_parallel",
        "torch numpy",
    ),
    "checkpoint": _unit(6, "comm engine host.torch tensor_parallel", "torch lightning safetensors transformers xxhash"),
    "callbacks": _unit(7, "checkpoint comm engine generators host loaders topology", "torch lightning numpy"),
    "steps": _unit(8, "callbacks comm engine host recompute topology", "torch lightning torchmetrics"),
    "preflight": _unit(
        8,
        "callbacks comm config deferred_init host kernels layout names schedule topology",
        "torch lightning torchmetrics",
    ),
    "check": _unit(
        9,
        "callbacks comm config engine generators host kernels layout names own_class schedule steps tensor_parallel "
        "topology",
        "torch lightning numpy",
    ),
    "run": _unit(9, "callbacks checkpoint comm config deferred_init engine layout steps", "torch lightning"),
    "strategy": _unit(
        10,
        "callbacks checkpoint comm config data_parallel deferred_init engine host layout loaders precision preflight "
        "random_streams run steps topology",
        "torch lightning",
    ),
    "__init__": _unit(11, "check config precision strategy"),  # for users; others import where a name is defined
    "cli": _unit(
        12,
        "__init__ check checkpoint config data kernels layout recipes schedule strategy",
        "torch lightning jsonargparse rich tokenizers transformers",
    ),
    "__main__": _unit(13, "cli"),
}

HOSTS = ("torch", "torchmetrics", "lightning")

# Where environment variables are read.
ENVIRONMENT_READERS = {
    "kernels/build.py": "variables may steer a build",
    "loaders/replicas.py": "Lightning's own switch for seeding workers, which it would read with the wrong rank",
    "cli": "variables may steer what a terminal shows",
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

    @cached_property
    def own_names(self) -> set[str]:
        """What the file gives to its classes: methods, fields, and attributes that are set on self."""
        found = {node.name for node in self.nodes if isinstance(node, ast.FunctionDef)}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node.value) == "self":
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
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
    if source.is_in("cli", "__main__.py"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _dotted(node.func) == "print":
            yield f"{node.lineno}: a library logs, print is for the command line; use logging.getLogger(__name__)"


def apex_is_not_imported(source: Source) -> Iterator[str]:
    """The apex on PyPI is another project, so the name says nothing."""
    for item in source.imports:
        if _is_below(item.target, ("apex",)):
            yield f"{item.line}: apex on PyPI is not NVIDIA's; recognise it by what it contains, in compat/"


def private_names_stand_in_host(source: Source) -> Iterator[str]:
    """Only host/ uses private names of PyTorch, torchmetrics and Lightning: of modules, and of objects.

    An underscored attribute of another object is somebody's private name, unless the file itself gives it to a class.
    """
    if source.is_in("host"):
        return
    for line, name in sorted(_names(source)):
        if _is_below(name, HOSTS) and any(map(_is_private, name.split("."))):
            yield f"{line}: private names of the hosts stand in host/, with a reason; give {name} a function there"
    mine = {"self", "cls", *HOSTS, *(item.local for item in source.imports)}  # of imported names, see above
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in source.own_names:
            if _dotted(node.value).partition(".")[0] in mine and isinstance(node.value, ast.Name):
                continue
            yield f"{node.lineno}: private names of the hosts stand in host/; give .{node.attr} a function there"


def host_files_know_one_host(source: Source) -> Iterator[str]:
    """A file of host/ knows the package it is named after and torch, so that who needs torch gets no Lightning."""
    if not source.is_in("host"):
        return
    for item in source.imports:
        top = item.target.partition(".")[0]
        if top in (*HOSTS, PACKAGE) and top not in ("torch", source.path.stem):
            yield f"{item.line}: host/{source.path.name} is about {source.path.stem} alone, and imports no {top}"


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
    private_names_stand_in_host,
    host_files_know_one_host,
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


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_below(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
