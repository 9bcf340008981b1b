"""The interface by which a stage asks for the user's step, the loss that it gives, and the start of its backward."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class StepRun(Protocol):
    """The user's step on the microbatches of one batch."""

    def call(self, stage: int, microbatch: int, *, is_whole: bool) -> Any:
        """Run the user's step on a microbatch as `stage`; returns what the step returned.

        Args:
            stage: its number.
            microbatch: its number.
            is_whole: whether the stage is the whole module, in which nothing calls `after_blocks`.
        """

    def enter_stage(self, stage: int) -> None:
        """Take note that the stage's first block is about to run."""

    def after_blocks(self) -> None:
        """Take note that the model's last block has run: what follows is the head and the loss."""

    def take(self, microbatch: int, result: Any) -> Tensor | None:
        """Keep what the step returned on the last stage; returns the scalar that backward starts from, if any."""

    def backward(self, loss: Tensor) -> None:
        """Start the backward of a microbatch from its scalar."""
