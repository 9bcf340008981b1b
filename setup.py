"""Names the packages, which pyproject.toml cannot: all below lightning_ptdp, and recipes/ as lightning_ptdp.recipes."""

from setuptools import find_packages, setup

PACKAGES = find_packages(include=["lightning_ptdp", "lightning_ptdp.*"])
RECIPES = ["lightning_ptdp.recipes", *(f"lightning_ptdp.recipes.{name}" for name in find_packages("recipes"))]

setup(packages=PACKAGES + RECIPES)
