"""`self.log` in hooks: what only some ranks log becomes known to all, and nobody waits for a value that never comes.

Every rank runs every hook. A plain value goes to Lightning at once. A value that replicas merge, or a Metric (which
they compute together), waits for the end of the module's hook: then the ranks compare what they logged. Callbacks run
a hook before the module does, so this covers them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torchmetrics import Metric

from lightning_ptdp.comm.collectives import gather_objects
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.engine.outputs import numbers
from lightning_ptdp.host.lightning import hook_in_progress
from lightning_ptdp.steps.exchange import Exchange, Key, Logged
from lightning_ptdp.steps.log_calls import LogCalls, named

_EPOCHS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end")
HOOKS = (
    *(f"on_{loop}_{point}" for loop in ("train", "validation", "test") for point in _EPOCHS),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
)
"""The module's hooks outside of steps in which Lightning allows to log."""

_BEFORE_SOME_CALLBACKS = "on_train_epoch_end"  # checkpoint and early-stopping callbacks run it after the module


class HookLogs:
    """Takes the log calls of a module's hooks, and of the callbacks' hooks of the same names."""

    def __init__(
        self,
        module: pl.LightningModule,
        calls: LogCalls,
        exchange: Exchange,
        groups: Groups,
        device: torch.device,
        num_samples: Callable[[], int | None],
    ) -> None:
        """
        Args:
            module: the user's.
            calls: reads and makes its calls of `log`.
            exchange: lets ranks agree on what they logged.
            groups: of this rank.
            device: where logged values are put.
            num_samples: tells the rows of the batch that the running hook is about: 0 for a batch that does not count,
                None between batches.
        """
        self._module, self._calls, self._exchange = module, calls, exchange
        self._groups, self._device, self._num_samples = groups, device, num_samples
        self._own: dict[str, Any] = {}
        self._logged: dict[str, list[Logged]] = {}
        self._done: dict[str, set[Key]] = {}
        self._is_over = False

    def attach(self, callbacks: Sequence[Callback], *, extra: Sequence[str] = ()) -> None:
        """Compare what ranks logged, after each hook that user code defines on any rank; every rank must call this.

        Args:
            callbacks: the Trainer's.
            extra: names of other hooks to compare after.
        """
        mine = [hook for hook in HOOKS if any(_is_users(owner, hook) for owner in (self._module, *callbacks))]
        for hook in sorted({*extra, *(hook for hooks in gather_objects(mine, self._groups.world) for hook in hooks)}):
            self._own[hook] = self._module.__dict__.get(hook)
            self._module.__dict__[hook] = self._compared(hook, getattr(self._module, hook))

    def detach(self) -> None:
        """Give the module its own hooks back."""
        for hook, own in self._own.items():
            self._module.__dict__.pop(hook)
            if own is not None:
                self._module.__dict__[hook] = own
        self._own.clear()

    def enter_step(self) -> None:
        """Note that an epoch goes on, so that calls in its last hook are compared."""
        self._is_over = False

    def log(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call of `log`, at once or for the end of the hook."""
        hook = hook_in_progress(self._module)
        is_other = isinstance(value, Metric) and not self._calls.knows(value)
        # A callback's hook that runs after the module's: the ranks have compared, and do so no more in this epoch.
        is_late = self._is_over and hook == _BEFORE_SOME_CALLBACKS
        if hook not in self._own or is_late or is_other or named(args, kwargs).get("sync_dist_group"):
            self._calls.log(name, value, *args, **kwargs)
            return
        logged = self._logged.setdefault(hook, [])
        seen = Counter(before.key.name for before in logged)
        call = self._calls.read(name, value, args, kwargs, call=seen[name])
        key = call.key
        if key.refusal is not None:
            raise key.refusal.error()
        rows = self._num_samples()
        samples = 1.0 if rows is None else float(rows)
        if call.batch_size is not None and rows != 0:
            samples = call.batch_size
        number = numbers([call.value])[0] if call.value is not None else float("nan")
        logged.append(Logged(key, number, samples, samples))
        waits = key.metric is not None or (key.is_synced and self._groups.data.size() > 1) or rows == 0
        if not waits:
            self._done.setdefault(hook, set()).add(key)
            self._calls.make(key, value, None if call.batch_size is None else round(call.batch_size))

    def _compared(self, hook: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            logged, done = self._logged.pop(hook, []), self._done.pop(hook, set())
            agreed = self._exchange.agree(tuple(logged))
            self._calls.replay((value for value in agreed if value.key not in done), self._device)
            self._is_over = hook == _BEFORE_SOME_CALLBACKS
            return result

        return run


def _is_users(owner: object, hook: str) -> bool:
    """Whether a hook of a module or callback is not one that Lightning defines."""
    function = getattr(owner, hook, None)
    written_in = getattr(function, "__module__", None) or ""
    return function is not None and not written_in.startswith(("lightning.pytorch.", "lightning_ptdp."))
