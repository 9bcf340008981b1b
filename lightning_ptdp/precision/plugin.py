"""The precision plug-in: Lightning's own, with clipping and a loss scale that see every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptdp.data_parallel.clip import clip_
from lightning_ptdp.host.lightning import HooksPrecision
from lightning_ptdp.precision.loss_scale import LossScale

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
MAX_SKIPPED = 20  # so many skipped steps in a row, at the lowest scale, end the run

NormOf = Callable[[list[nn.Parameter]], Tensor]

log = logging.getLogger(__name__)


class PTDPPrecision(HooksPrecision):
    """Says what dtypes a run uses, and steps optimizers accordingly.

    "32-true" and "64-true" keep weights and compute in float32 and float64. "bf16-mixed" and "16-mixed" run operations
    in 16 bits under autocast over float32 weights. "bf16-true" and "16-true" keep weights and compute in 16 bits, and
    optimizers step float32 main weights. Gradients accumulate and are reduced in float32, or wider. The two of float16
    scale the loss.

    Attributes:
        num_updates: how often optimizers have stepped.
        num_skipped: how often they have not, because gradients were not finite.
        was_skipped: whether the last step was skipped.
        keeps_copies: whether autocast may keep the 16-bit copies of weights from one microbatch to the next, which is
            right if no step of the user's changes weights.
    """

    def __init__(
        self,
        precision: str = "32-true",
        device: str | None = None,
        *,
        initial_scale: float = 65536.0,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        backoff_factor: float = 0.5,
        minimum_scale: float = 1.0,
        hysteresis: int = 1,
    ) -> None:
        """
        Args:
            precision: one of `PRECISIONS`.
            device: the type of device that autocast is for; None takes "cuda" if there is one, else "cpu".
            initial_scale: the first loss scale of float16; for it and the following see `LossScale`.
            growth_factor: by which it grows.
            growth_interval: good steps until it grows.
            backoff_factor: by which it shrinks.
            minimum_scale: the least one.
            hysteresis: bad steps until it shrinks.

        Raises:
            ValueError: another precision, or a scale that makes no sense.
        """
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {', '.join(map(repr, PRECISIONS))} under PTDPStrategy; got {precision!r}"
            )
        self.precision: Any = precision
        self._inner = _make(precision, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.loss_scale: LossScale | None = None
        if precision in ("16-mixed", "16-true"):
            self.loss_scale = LossScale(
                initial_scale, growth_factor, growth_interval, backoff_factor, minimum_scale, hysteresis
            )
        self.keeps_copies = False
        self.num_updates = self.num_skipped = self._skipped_in_a_row = 0
        self.was_skipped = False
        self._is_finite = True
        self._norm_of: NormOf | None = None
        self._after_hooks: Callable[[], None] | None = None

    @classmethod
    def of(cls, plugin: Precision) -> PTDPPrecision:
        """Make the counterpart of one of Lightning's plug-ins.

        Raises:
            ValueError: there is none.
        """
        if isinstance(plugin, PTDPPrecision):
            return plugin
        device = plugin.device if isinstance(plugin, MixedPrecision) else None
        return cls(str(plugin.precision), device)

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of losses: float64 in a run of that precision, else float32."""
        return torch.float64 if self.precision == "64-true" else torch.float32

    def bind(self, norm_of: NormOf, after_hooks: Callable[[], None]) -> None:
        """Let the strategy take part.

        Args:
            norm_of: computes the norm of gradients over the whole model, on all ranks.
            after_hooks: is called when hooks and clipping are done with gradients, right before a step.
        """
        self._norm_of, self._after_hooks = norm_of, after_hooks

    def hooks_are_done(self) -> None:
        """Tell the strategy that hooks and clipping are done with the gradients."""
        if self._after_hooks is not None:
            self._after_hooks()

    @property
    def has_main_weights(self) -> bool:
        """Whether optimizers step float32 copies of the weights."""
        return self.precision in ("bf16-true", "16-true")

    @property
    def scale(self) -> float:
        """What losses are multiplied by before backward, and gradients divided by after it."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    @property
    def is_in_trouble(self) -> bool:
        """Whether the next step without finite gradients ends the run."""
        return self.loss_scale is not None and self.loss_scale.is_lowest and self._skipped_in_a_row >= MAX_SKIPPED - 1

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward from the scaled loss."""
        super().backward(tensor if self.scale == 1.0 else tensor * self.scale, model, optimizer, *args, **kwargs)

    def take_gradients(self, *, are_finite: bool) -> None:
        """Take note of whether the gradients of the step that follows are finite, on all ranks."""
        self._is_finite = are_finite

    def optimizer_step(  # type: ignore[override]  # as Lightning's own plug-ins for a Trainer
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step, unless scaled gradients are not finite."""
        if self.loss_scale is None:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
            self.num_updates += 1
            return result
        result = closure()
        self.end_closure(model, optimizer)
        before = self.loss_scale.value
        self.was_skipped = not self._is_finite
        if self.was_skipped:
            self.num_skipped += 1
            self._skipped_in_a_row += 1
        else:
            optimizer.step(**kwargs)
            self.num_updates += 1
            self._skipped_in_a_row = 0
        self.loss_scale.update(is_finite=self._is_finite)
        self._tell(model.trainer, before)
        return result

    def _tell(self, trainer: pl.Trainer, before: float) -> None:
        """Say that an update was skipped; loggers get the scale when it changes."""
        assert self.loss_scale is not None, "only called then"
        now = self.loss_scale.value
        if self.was_skipped and trainer.is_global_zero:
            log.warning(
                "step %d makes no update: its gradients are not finite; loss scale %g -> %g; %d steps skipped so far",
                trainer.global_step,
                before,
                now,
                self.num_skipped,
            )
        if self.was_skipped or now != before:
            for logger in trainer.loggers:
                logger.log_metrics(
                    {"loss_scale": now, "skipped_steps": float(self.num_skipped)}, step=trainer.global_step
                )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loss scale; nothing without one."""
        if self.loss_scale is None:
            return {}
        return {**self.loss_scale.state_dict(), "num_updates": self.num_updates, "num_skipped": self.num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        if self.loss_scale is not None and "good_steps" in state_dict:
            self.loss_scale.load_state_dict(state_dict)
            self.num_updates, self.num_skipped = state_dict["num_updates"], state_dict["num_skipped"]

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the gradients so that their norm over the whole model is at most `clip_val`."""
        assert self._norm_of is not None, "the strategy binds its norm at set-up"
        parameters = list(self.main_params(optimizer))
        clip_(parameters, self._norm_of(parameters), float(clip_val))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module's dtype, as Lightning's plug-in does."""
        return self._inner.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        """Convert a step's input, as Lightning's plug-in does."""
        return self._inner.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Convert a step's output, as Lightning's plug-in does."""
        return self._inner.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which tensors are made, that of Lightning's plug-in."""
        return self._inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are made, that of Lightning's plug-in."""
        return self._inner.module_init_context()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run a forward as Lightning's plug-in does, except that autocast may keep the 16-bit copies of weights."""
        inner = self._inner
        if not isinstance(inner, MixedPrecision) or not self.keeps_copies:
            with inner.forward_context():
                yield
            return
        with torch.autocast(inner.device, dtype=torch.bfloat16 if inner.precision == "bf16-mixed" else torch.half):
            yield


def _make(precision: str, device: str) -> Precision:
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("bf16-mixed", "16-mixed"):
        return MixedPrecision(precision, device)  # type: ignore[arg-type]  # one of the two
    if precision in ("bf16-true", "16-true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]  # one of the two
    return Precision()
