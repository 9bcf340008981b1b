"""What a rank notes for itself on a LightningModule."""

import threading
from typing import Any


class Kept:
    """Holds a value that the strategy must not carry from stage to stage: with its lock it is no plain data."""

    def __init__(self, value: Any) -> None:
        self.value, self._lock = value, threading.Lock()
