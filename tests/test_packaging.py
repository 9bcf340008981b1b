"""What an installed lightning_ptdp consists of."""

import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

CHECKOUT = Path(__file__).parent.parent
PARTS_OF_A_BUILD = ("lightning_ptdp", "recipes", "csrc", "tests", "pyproject.toml", "setup.py", "README.md")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout, with a package and a recipe that no list can know of."""
    root = tmp_path_factory.mktemp("source")
    for part in PARTS_OF_A_BUILD:
        if (CHECKOUT / part).is_dir():
            shutil.copytree(CHECKOUT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif (CHECKOUT / part).exists():
            shutil.copy(CHECKOUT / part, root / part)
    for name in (
        "lightning_ptdp/extra/deep/__init__.py",
        "recipes/sample/__init__.py",
        "recipes/sample/configs/a.yaml",
    ):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    (root / "lightning_ptdp/extra/__init__.py").touch()
    return root


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The names of the files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    built = subprocess.run([*command, folder, source], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return {name for name in ZipFile(path).namelist() if ".dist-info/" not in name}


@pytest.mark.slow
def test_wheel_holds_every_module_and_configuration(wheel, source):
    modules = {str(path.relative_to(source)) for path in source.glob("lightning_ptdp/**/*.py")}
    recipes = {
        str("lightning_ptdp" / path.relative_to(source))
        for pattern in ("*.py", "*.yaml")
        for path in source.glob(f"recipes/**/{pattern}")
    }
    assert modules | recipes <= wheel
    assert {"lightning_ptdp/extra/deep/__init__.py", "lightning_ptdp/recipes/sample/configs/a.yaml"} <= wheel


@pytest.mark.slow
def test_wheel_installs_one_top_level_package(wheel):
    assert {PurePosixPath(name).parts[0] for name in wheel if not name.endswith(".so")} == {"lightning_ptdp"}


@pytest.mark.slow
def test_wheel_says_that_it_is_typed(wheel):
    assert "lightning_ptdp/py.typed" in wheel
