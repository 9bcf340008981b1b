"""The package keeps the rules of tests/architecture.py, and the rules catch what breaks them."""

import re
from pathlib import Path

import pytest

from tests.architecture import UNITS, violations

CHECKOUT = Path(__file__).parent.parent
SOURCES = sorted([*CHECKOUT.glob("lightning_ptdp/**/*.py"), *CHECKOUT.glob("recipes/**/*.py")])
OTHER_SOURCES = sorted(
    path
    for pattern in ("csrc/**/*.*", "tests/**/*.py", "benchmarks/**/*.py", "Makefile", "pyproject.toml", "*.yaml")
    for path in CHECKOUT.glob(pattern)
    if path.is_file()
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_source_keeps_the_rules(path):
    assert violations(installed_name(path), path.read_text(encoding="utf-8")) == []


def test_everything_else_that_is_source_is_ascii():
    assert [path for path in OTHER_SOURCES if not path.read_bytes().isascii()] == []


def test_documentation_names_every_room():
    page = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {line.split("|")[2] for line in page.splitlines() if line.startswith("|") and line.count("|") == 4}
    named = {name.rstrip("/") for names in rooms for name in re.findall(r"`([\w/]+)`", names)}
    assert UNITS.keys() - named == set()


@pytest.mark.parametrize("name", UNITS)
def test_table_lists_lower_layers_only(name):
    for other in UNITS[name].ours:
        assert UNITS[other.partition(".")[0]].layer < UNITS[name].layer, other


BROKEN = {
    "unit without a layer": ("magic.py", "", "1: unit 'magic' is in no layer"),
    "torch in a pure unit": ("schedule/check.py", "import torch", "1: schedule (layer 0) may import packages none"),
    "upward import": (
        "comm/p2p.py",
        "from lightning_ptdp.engine.engine import Engine",
        "not lightning_ptdp.engine.engine.Engine",
    ),
    "sideways import": ("data_parallel/clip.py", "import lightning_ptdp.pipeline.stage", "not lightning_ptdp.pipeline"),
    "relative import": ("nn/linear.py", "from ..comm import groups", "not lightning_ptdp.comm.groups"),
    "import in a function": ("nn/a.py", "def f():\n    import lightning", "2: nn (layer 1) may import packages torch,"),
    "import of a unit by name": ("comm/p2p.py", "from lightning_ptdp import kernels", "not lightning_ptdp.kernels"),
    "root from inside": ("nn/a.py", "from lightning_ptdp import PTDPStrategy", "not lightning_ptdp.PTDPStrategy"),
    "strategy in a recipe": ("recipes/gpt/module.py", "from lightning_ptdp.strategy import PTDPStrategy", "nn of ours"),
    "dataset package in a recipe": (
        "recipes/gpt/data.py",
        "import datasets",
        "packages lightning, torch, torchmetrics, transformers, not datasets",
    ),
    "group made elsewhere": (
        "layout.py",
        "import torch.distributed as dist\ndist.new_group([0])",
        "2: process groups",
    ),
    "mesh made elsewhere": (
        "checkpoint/store.py",
        "from torch.distributed.device_mesh import init_device_mesh",
        "take torch.distributed.device_mesh.init_device_mesh from Groups",
    ),
    "collective by alias": (
        "layout.py",
        "from torch import distributed as d\nd.all_reduce(x)",
        "2: collectives are",
    ),
    "collective by full name": (
        "layout.py",
        "import torch\ntorch.distributed.isend(x, 1)",
        "2: collectives are",
    ),
    "collective by itself": (
        "layout.py",
        "from torch.distributed import broadcast as b\nb(x)",
        "2: collectives are",
    ),
    "functional collective": (
        "layout.py",
        "import torch.distributed.nn",
        "torch.distributed.nn a function there",
    ),
    "DTensor in compute": (
        "layout.py",
        "from torch.distributed.tensor import DTensor",
        "1: DTensor and DCP are for",
    ),
    "DCP in compute": ("layout.py", "import torch.distributed.checkpoint as dcp", "1: DTensor and DCP are for"),
    "variable read": (
        "layout.py",
        "import os\nx = os.environ['A']",
        "2: no environment variable changes what runs",
    ),
    "variable read by get": (
        "layout.py",
        "from os import environ\nenviron.get('A')",
        "so os.environ is not read",
    ),
    "variable read by getenv": ("layout.py", "import os\nos.getenv('A')", "so os.getenv is not read"),
    "print in the library": ("layout.py", "def f():\n    print(1)", "2: a library logs"),
    "apex by name": ("compat/apex.py", "from apex.optimizers import FusedAdam", "1: apex on PyPI is not NVIDIA's"),
    "private module": (
        "layout.py",
        "from torch.utils import _pytree as pytree",
        "1: private names of the hosts stand in host/, with a reason; give torch.utils._pytree a function there",
    ),
    "private class by alias": (
        "callbacks/users.py",
        "from torch import nn\nbase = nn.modules.batchnorm._BatchNorm",
        "2: private names of the hosts stand in host/, with a reason; give torch.nn.modules.batchnorm._BatchNorm",
    ),
    "private function of Lightning": (
        "loaders/replicas.py",
        "from lightning.pytorch.utilities.data import _update_dataloader",
        "give lightning.pytorch.utilities.data._update_dataloader a function there",
    ),
    "private attribute": (
        "steps/metrics.py",
        "def f(metric):\n    return metric._update_count",
        "2: private names of the hosts stand in host/; give ._update_count a function there",
    ),
    "private attribute of an attribute": (
        "steps/hook_logs.py",
        "class A:\n    def f(self):\n        return self.module._current_fx_name",
        "3: private names of the hosts stand in host/; give ._current_fx_name a function there",
    ),
    "Lightning beside torch's names": (
        "host/torch.py",
        "import lightning.pytorch as pl",
        "1: host/torch.py is about torch alone, and imports no lightning",
    ),
    "letter that looks like another": ("layout.py", "\n# caf\u00e9", "2: source is ASCII; found U+00E9"),
}


@pytest.mark.parametrize(("path", "text", "finding"), BROKEN.values(), ids=BROKEN.keys())
def test_rule_catches(path, text, finding):
    found = violations(f"lightning_ptdp/{path}", text)
    assert any(finding in violation for violation in found), found


SOUND = {
    "standard library": ("schedule/check.py", "import os.path\nfrom collections.abc import Iterator"),
    "own unit": ("schedule/check.py", "from .action import Op\nfrom lightning_ptdp.schedule import draw"),
    "lower layer": ("layout.py", "from lightning_ptdp import config\nimport lightning_ptdp.pipeline.runtime"),
    "module at the top": ("recompute/choice.py", "from lightning_ptdp.generators import kept"),
    "front end": ("strategy.py", "import lightning.pytorch as pl\nfrom .precision import PTDPPrecision"),
    "recipe": (
        "recipes/gpt/module.py",
        "import torch, lightning\nfrom lightning_ptdp.nn import LayerNorm\nfrom . import m",
    ),
    "group in its place": ("comm/groups.py", "import torch.distributed as dist\ndist.new_group([0])"),
    "collective in its place": ("comm/collectives.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    "method of the same name": ("strategy.py", "strategy.broadcast(x)\nself.all_gather(x)"),
    "type of a group": ("layout.py", "from torch.distributed import ProcessGroup"),
    "DTensor in its place": ("checkpoint/store.py", "from torch.distributed.tensor import DTensor"),
    "variable set for others": ("data/tokenise.py", "import os\nos.environ['A'] = '1'\ndel os.environ['A']"),
    "variable read for a build": ("kernels/build.py", "import os\nos.environ.get('MAX_JOBS')"),
    "print on a terminal": ("cli/main.py", "print(1)"),
    "private names in their place": (
        "host/lightning.py",
        "from lightning.fabric.utilities.types import _Stateful\nimport torch\ntorch._C.f(x._version)",
    ),
    "private names of one's own": (
        "callbacks/users.py",
        "class A:\n    def f(self, other):\n        self._x = other._x\n        self.y = other.__class__",
    ),
    "private function of Python": ("comm/failure.py", "import os\nos._exit(1)"),
    "escape of a letter": ("layout.py", "x = '\\u00e9'"),
}


@pytest.mark.parametrize(("path", "text"), SOUND.values(), ids=SOUND.keys())
def test_rules_let_pass(path, text):
    assert violations(f"lightning_ptdp/{path}", text) == []


def installed_name(path: Path) -> str:
    """Where an install puts a source file: recipes lie inside the package."""
    below = path.relative_to(CHECKOUT)
    return str(Path("lightning_ptdp") / below if below.parts[0] == "recipes" else below)
