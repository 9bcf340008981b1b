"""Runs one save at a time in a thread, so that training goes on while files are written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one act after the other; an error is raised by the next call."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def start(self, act: Callable[[], None]) -> None:
        """Begin an act; the one before must have been waited for."""
        self._running = self._executor.submit(act)

    def after(self, act: Callable[[], None]) -> None:
        """Run a short act when the one that is running has succeeded; at once if none is."""
        if self._running is None:
            act()
            return
        running = self._running

        def then() -> None:
            running.result()
            act()

        self._running = self._executor.submit(then)

    def wait(self) -> None:
        """Wait until nothing runs, and raise what went wrong."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait until nothing runs, and end the thread."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
