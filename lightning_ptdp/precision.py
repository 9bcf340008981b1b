"""The precision plug-in: Lightning's own, with clipping that sees every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.data_parallel.clip import clip_

PRECISIONS = ("32-true", "64-true", "bf16-mixed")

NormOf = Callable[[list[nn.Parameter]], Tensor]


class PTDPPrecision(Precision):
    """What dtypes a run uses.

    "32-true" and "64-true" keep weights and compute in float32 and float64; "bf16-mixed" runs operations in bfloat16
    under autocast over float32 weights. Gradients accumulate and are reduced in float32, or wider.
    """

    def __init__(self, precision: str = "32-true", device: str | None = None) -> None:
        """precision: one of `PRECISIONS`. device: of autocast; None takes the strategy's.

        Raises:
            ValueError: another precision.
        """
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(map(repr, PRECISIONS))} under PTDPStrategy; got {precision!r}"
            )
        self.precision: Any = precision
        self._inner = _make(precision, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._norm_of: NormOf | None = None
        self._after_hooks: Callable[[], None] | None = None

    @classmethod
    def of(cls, plugin: Precision) -> PTDPPrecision:
        """The counterpart of one of Lightning's plug-ins.

        Raises:
            ValueError: there is none.
        """
        if isinstance(plugin, PTDPPrecision):
            return plugin
        device = plugin.device if isinstance(plugin, MixedPrecision) else None
        return cls(str(plugin.precision), device)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Of losses: float32, or float64 in a run of that."""
        return torch.float64 if self.precision == "64-true" else torch.float32

    def bind(self, norm_of: NormOf, after_hooks: Callable[[], None]) -> None:
        """Take the function that knows the norm over all ranks, and one to call when hooks are done with gradients."""
        self._norm_of, self._after_hooks = norm_of, after_hooks

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        super()._after_closure(model, optimizer)
        if self._after_hooks is not None:
            self._after_hooks()

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the gradients so that their norm over the whole model is at most `clip_val`."""
        assert self._norm_of is not None, "the strategy binds its norm at set-up"
        parameters = list(self.main_params(optimizer))
        clip_(parameters, self._norm_of(parameters), float(clip_val))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """As Lightning's plug-in does."""
        return self._inner.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        """As Lightning's plug-in does."""
        return self._inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """As Lightning's plug-in does."""
        return self._inner.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """As Lightning's plug-in does."""
        return self._inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """As Lightning's plug-in does."""
        return self._inner.module_init_context()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """As Lightning's plug-in does."""
        with self._inner.forward_context():
            yield


def _make(precision: str, device: str) -> Precision:
    if precision == "64-true":
        return DoublePrecision()
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device)
    return Precision()
