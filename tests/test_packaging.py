"""What an installed lightning_ptdp consists of."""

import os
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


def build_wheel(source, folder, **variables):
    """The wheel of a source tree; the compiled kernels come from the machine's cache where they are in it."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    environment = {**os.environ, **variables}
    built = subprocess.run([*command, folder, source], capture_output=True, text=True, check=False, env=environment)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def names_in(path):
    return {name for name in ZipFile(path).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The names of the files in the wheel."""
    return names_in(build_wheel(source, tmp_path_factory.mktemp("wheel")))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernels")
def test_wheel_with_a_compiler_carries_the_kernels_for_every_python(source, tmp_path):
    path = build_wheel(source, tmp_path, PTDP_BUILD="auto")
    assert path.name.startswith("lightning_ptdp-0.1.0-py3-none-linux_")
    assert "lightning_ptdp/kernels/libptdp_kernels.so" in names_in(path)


@pytest.mark.slow
def test_wheel_without_a_compiler_is_pure_python_with_the_sources(source, tmp_path):
    path = build_wheel(source, tmp_path, CXX="no-such-compiler")
    assert path.name == "lightning_ptdp-0.1.0-py3-none-any.whl"
    names = names_in(path)
    assert not [name for name in names if name.endswith(".so")]
    sources = {str("lightning_ptdp" / file.relative_to(source)) for file in source.glob("csrc/**/*.*")}
    assert {"lightning_ptdp/csrc/api.h", "lightning_ptdp/csrc/cuda/kernels.cu"} <= sources <= names


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
