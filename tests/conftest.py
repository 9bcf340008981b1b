"""What holds for every test: order, seeds, hygiene, warnings as errors, the gpu marker, and the end of the pool."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ptdp import kernels
from tests.host_warnings import ini_lines
from tests.hygiene import Surroundings, seed_everything
from tests.spmd import close_pool, warm_pool

TESTS = Path(__file__).parent
COSTLY = ("trainer", "kernels", "data", "deferred_init", "cli", "recipes")  # folders where a test takes a second


def pytest_configure(config: pytest.Config) -> None:
    """Set what holds for the whole session; tests/spmd_worker.py does the same in the workers."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
    for line in ini_lines():
        config.addinivalue_line("filterwarnings", line)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make test-fast` selects by."""
    parser.addoption(
        "--fast",
        action="store_true",
        help=f"no slow tests, and of each file in {', '.join(COSTLY)} the first of the others",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files that take long first, so that workers end together; select for --fast."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not _is_costly(item), item.path not in slow_files))  # stable, so files stay whole
    if config.option.fast:
        firsts = {item.path: item for item in reversed(items) if not item.get_closest_marker("slow")}
        chosen = [
            item
            for item in items
            if not item.get_closest_marker("slow") and (not _is_costly(item) or item is firsts[item.path])
        ]
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def _is_costly(item: pytest.Item) -> bool:
    return item.path.relative_to(TESTS).parts[0] in COSTLY


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import on another core while the first tests run, if any test may use it."""
    if not session.config.option.collectonly:
        kernels.load()  # once, before workers would all wait for the build
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    if not session.config.option.collectonly and any({"spmd", "run_spmd"} & vars(module).keys() for module in modules):
        warm_pool()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_unconfigure() -> None:
    """End the workers, after an interrupt too."""
    close_pool()


@pytest.fixture(autouse=True)
def hygiene() -> Iterator[None]:
    """Start every test from the same seeds, and fail it if it leaves something behind."""
    before = Surroundings.observe()
    seed_everything()
    yield
    if leaks := before.restore():
        pytest.fail("left behind\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def calm_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers load in this thread, for it doesn't wait for its own to end, and without bars."""
    logging = pytest.importorskip("transformers").utils.logging
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
