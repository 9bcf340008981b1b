"""What pyproject.toml cannot say: the packages, and the compiled kernels.

Packages are all below lightning_ptdp, recipes/ as lightning_ptdp.recipes, and csrc/ as data. Where a compiler and
PyTorch are at hand (pip: --no-build-isolation) a wheel carries the compiled kernels, and an editable install leaves
them in the cache; elsewhere the wheel is pure Python, and kernels are built on first use where that can be done.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CHECKOUT = Path(__file__).resolve().parent
PACKAGES = find_packages(include=["lightning_ptdp", "lightning_ptdp.*"])
RECIPES = ["lightning_ptdp.recipes", *(f"lightning_ptdp.recipes.{name}" for name in find_packages("recipes"))]
SOURCES = ["lightning_ptdp.csrc"]


def load_builder() -> ModuleType:
    """lightning_ptdp.kernels.build, without importing the package, whose dependencies may be missing here."""
    name = "ptdp_builder"
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "lightning_ptdp/kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


builder = load_builder()


def can_build() -> bool:
    """Whether there are a compiler and PyTorch. PTDP_BUILD=require raises where there aren't."""
    try:
        builder.commands_here()
    except builder.BuildError:
        if builder.is_required():
            raise
        return False
    return True


class BuildPython(build_py):
    """Also compiles the kernels; a failure leaves the wheel without them, unless PTDP_BUILD=require."""

    def run(self) -> None:
        super().run()
        if not can_build():
            return
        try:
            library = builder.cached(builder.commands_here(), again=builder.is_required())
        except builder.BuildError as error:
            if builder.is_required():
                raise
            self.warn(f"the kernels were not compiled, PyTorch's own operations will serve: {error}")
            return
        if not self.editable_mode:
            shutil.copy(library, Path(self.build_lib).resolve() / "lightning_ptdp/kernels" / builder.LIBRARY)


class Wheel(bdist_wheel):
    """Names the platform if kernels are inside, but no version of Python: the library knows none."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


class WithKernels(Distribution):
    """Says whether the wheel belongs to a platform."""

    def has_ext_modules(self) -> bool:
        return can_build()


setup(
    packages=PACKAGES + RECIPES + SOURCES,
    distclass=WithKernels,
    cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel},
)
