"""The examples of the documentation run, and all that they show is Python."""

import ast
import os
from contextlib import chdir
from typing import Any
from unittest.mock import patch

import pytest

from tests.docs.pages import CHECKOUT, PAGES, Example, examples
from tests.spmd import run_spmd

WITH_EXAMPLES = [page for page in PAGES if any(example.runs for example in examples(page))]


def name_of(page):
    return str(page.relative_to(CHECKOUT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_python(page):
    for example in examples(page):
        ast.parse(example.code, filename=f"{name_of(page)}, block of line {example.line}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_is_ascii(page):
    assert page.read_bytes().isascii()


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_examples_of_a_page_run_in_one_process(page, tmp_path):
    marked = [example for example in examples(page) if example.runs]
    for package in {example.needs for example in marked if example.needs}:
        pytest.importorskip(package)
    blocks = [example.for_one_process() for example in marked]
    run_spmd(run_blocks, world_size=1, timeout=60, page=name_of(page), blocks=blocks, folder=str(tmp_path))


def run_blocks(page: str, blocks: list[str], folder: str) -> None:
    """Run the blocks one after the other, in one namespace and a folder of their own."""
    namespace: dict[str, Any] = {"__name__": "example"}
    with chdir(folder), patch.dict(os.environ):  # Lightning's environment removes the world size when a run ends
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)


def test_marked_block_is_found_and_shrunk(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- test -->\n```python\nf(devices=8, tensor_parallel_size=2)\n```\n\n```python\ng()\n```\n")
    first, second = examples(page)
    assert first == Example("f(devices=8, tensor_parallel_size=2)\n", line=4, runs=True, needs=None)
    assert first.for_one_process() == "\n\n\nf(devices=1, tensor_parallel_size=1)\n"
    assert not second.runs
