"""What a test may not leave behind, in the parent and in the workers of the pool alike."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def _leave_function_modes(number: int) -> None:
    while torch._C._len_torch_function_stack() > number:
        torch._C._pop_torch_function_stack()


# Settings of torch that outlive the code that sets them: name -> (read, write).
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, lambda device: torch.set_default_device(None)),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "number of function modes": (torch._C._len_torch_function_stack, _leave_function_modes),
}

# Variables that others set as they work, so that a change of them says nothing about the test: restored in silence.
FOREIGN_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest, at every phase of every test",
    "PL_GLOBAL_SEED": "lightning.fabric.utilities.seed.seed_everything",
    "PL_SEED_WORKERS": "lightning.fabric.utilities.seed.seed_everything",
    "CUBLAS_WORKSPACE_CONFIG": "Trainer(deterministic=True)",
}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state of a process that tests share, as it was at one moment."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    settings: dict[str, Any]
    default_group: dist.ProcessGroup | None

    @classmethod
    def observe(cls) -> "Surroundings":
        """Take down the state of this process."""
        return cls(
            environment=dict(os.environ),
            threads=frozenset(threading.enumerate()),
            settings={name: read() for name, (read, _) in SETTINGS.items()},
            default_group=dist.group.WORLD if dist.is_initialized() else None,
        )

    def restore(self) -> list[str]:
        """Bring the process back to this state, and name what had changed: nothing in a clean test."""
        return [*self._environment(), *self._threads(), *self._settings(), *self._default_group()]

    def _environment(self) -> list[str]:
        was, now = self.environment, dict(os.environ)
        changed = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
        for name in changed:
            if name in was:
                os.environ[name] = was[name]
            else:
                del os.environ[name]
        return [
            f"environment variable {name}: was {was.get(name)!r}, is {now.get(name)!r}; use monkeypatch.setenv"
            for name in changed
            if name not in FOREIGN_VARIABLES
        ]

    def _threads(self) -> list[str]:
        started = [t for t in threading.enumerate() if t not in self.threads and t.is_alive() and not t.daemon]
        return [f"thread {thread.name!r} is still running; join it, or shut its executor down" for thread in started]

    def _settings(self) -> list[str]:
        leaks = []
        for name, (read, write) in SETTINGS.items():
            if (value := read()) != self.settings[name]:
                leaks.append(f"torch's {name}: was {self.settings[name]}, is {value}; set it back")
                write(self.settings[name])
        return leaks

    def _default_group(self) -> list[str]:
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is self.default_group:
            return []
        if group is None:
            return ["default process group: destroyed; leave that to the one that made it"]
        dist.destroy_process_group()
        return ["default process group: made and not destroyed; call destroy_process_group"]


@contextmanager
def unraisable_errors() -> Iterator[list[str]]:
    """Collect the errors that Python can only print, such as a ResourceWarning for a file that nobody closed."""
    found: list[str] = []
    usual = sys.unraisablehook
    sys.unraisablehook = lambda error: found.append(f"{error.exc_type.__name__}: {error.exc_value}")
    try:
        yield found
    finally:
        sys.unraisablehook = usual


def seed_everything(seed: int = 0) -> None:
    """Seed the global generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
