"""`ptdp recipes`, which lists the configurations that come with the package."""

from importlib.util import find_spec
from pathlib import Path

from .terminal import say, show_table


def list_recipes() -> None:
    """List the bundled configurations: name, what it is, and where they lie."""
    recipes = bundled_recipes()
    rows = [[name, describe(path)] for name, path in recipes.items()]
    show_table("bundled recipes: ptdp fit --config NAME", ["name", "what it is"], rows)
    for folder in dict.fromkeys(path.parents[2] for path in recipes.values()):
        say(f"files: {folder}/*/configs/*.yaml")


def bundled_recipes() -> dict[str, Path]:
    """Find the YAML file of every bundled configuration, by name ("gpt/tiny")."""
    spec = find_spec("lightning_ptdp.recipes")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*/configs/*.yaml"))
    return {f"{file.parents[1].name}/{file.stem}": file for file in files}


def recipe_path(name: str) -> Path | None:
    """Find the file of a bundled configuration; None if there is none of that name."""
    return bundled_recipes().get(name.removesuffix(".yaml"))


def describe(path: Path) -> str:
    """Read the first comment line of a configuration, which says what it is."""
    first = path.read_text().splitlines()[0]
    return first.removeprefix("#").strip()
