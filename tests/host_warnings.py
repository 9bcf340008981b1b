"""Warnings are errors in every test, except these, which packages of the host raise at each other."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning.fabric.utilities.warnings import PossibleUserWarning


@dataclass(frozen=True, slots=True)
class HostWarning:
    """A warning that says nothing about our code.

    message: regular expression that its text starts with; no colons, because pytest separates by them.
    source: what warns, as version and file. reason: why a test can do nothing about it, or need not.
    """

    message: str
    category: type[Warning]
    source: str
    reason: str


HOST_WARNINGS = (
    HostWarning(
        message=r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        category=FutureWarning,
        source="Lightning 2.6.6 on torch 2.13, pytorch/utilities/_pytree.py",
        reason="every fit, validate, test and predict flattens its dataloaders with it",
    ),
    HostWarning(
        message=r"Checkpoint directory .* exists and is not empty",
        category=UserWarning,
        source="Lightning 2.6.6, pytorch/callbacks/model_checkpoint.py",
        reason="a resumed fit writes where the first one wrote, as it should",
    ),
    HostWarning(
        message=r"The number of training batches \(\d+\) is smaller than the logging interval",
        category=PossibleUserWarning,
        source="Lightning 2.6.6, pytorch/loops/fit_loop.py",
        reason="tests train for a few steps",
    ),
    HostWarning(
        message=r"The '\w+' does not have many workers",
        category=PossibleUserWarning,
        source="Lightning 2.6.6, pytorch/trainer/connectors/data_connector.py",
        reason="tests load tiny tensors in the main process; the warning depends on the number of cores",
    ),
)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    """Raise every warning inside the block, except HOST_WARNINGS; pytest does the same by `ini_lines`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in HOST_WARNINGS:
            warnings.filterwarnings("ignore", message=known.message, category=known.category)
        yield


def ini_lines() -> list[str]:
    """The same filters as lines of pytest's `filterwarnings`."""
    ignored = [f"ignore:{known.message}:{_full_name(known.category)}" for known in HOST_WARNINGS]
    return ["error", *ignored]


def _full_name(category: type[Warning]) -> str:
    return f"{category.__module__}.{category.__qualname__}"
