"""apex.optimizers.FusedAdam: Adam over lists of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.kernels import AdamStep, adam_, count_


class FusedAdam(Optimizer):
    """Adam, or AdamW (adam_w_mode), with all parameters of a device and dtype in one kernel.

    Moments are float32, of a float64 parameter float64. The state of a parameter has the names of torch.optim.AdamW's:
    step, exp_avg, exp_avg_sq; with master_weights also master, the float32 weight of a 16-bit parameter.

    Args:
        params: as torch.optim.AdamW; so are lr, betas, eps and weight_decay.
        bias_correction: divide moments by 1 - beta^step.
        adam_w_mode: decay the weight itself; else add it to the gradient.
        set_grad_none: `zero_grad` removes gradients.
        master_weights: keep a float32 weight for each 16-bit parameter.

    Raises:
        ValueError: amsgrad or capturable, which these kernels don't have.
    """

    is_elementwise = True  # what lightning_ptdp asks of an optimizer whose parameters it splits

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or capturable:
            raise ValueError(
                f"FusedAdam has neither amsgrad nor capturable; got amsgrad={amsgrad}, capturable={capturable}; use "
                "torch.optim.AdamW for these"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.master_weights = master_weights

    def __getstate__(self) -> dict[str, Any]:
        """Give copies and pickles the options of this class, which torch's own state leaves out."""
        own = ("adam_w_mode", "set_grad_none", "master_weights")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; `closure` recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        """Step the parameters of a group that have a gradient.

        Everything is looked up anew in each step, so that parameters and states may be exchanged between steps.
        """
        grads = [grad for p in group["params"] if (grad := p.grad) is not None]
        if any([grad.is_sparse for grad in grads]):  # noqa: C419  a list is faster, and there may be thousands
            raise ValueError("FusedAdam takes dense gradients; use torch.optim.SparseAdam for sparse ones")
        parameters: list[Tensor] = group["params"]
        if len(grads) < len(parameters):
            parameters = [p for p in parameters if p.grad is not None]
        states = [self.state[p] or self._start(p) for p in parameters]
        steps = count_([state["step"] for state in states])
        if len(set(steps)) == len({p.dtype for p in parameters}) == len({p.device for p in parameters}) == 1:
            self._update(group, parameters, grads, states, steps[0])
            return
        kinds: dict[tuple[float, torch.dtype, torch.device], list[int]] = defaultdict(list)
        for i, (step, parameter) in enumerate(zip(steps, parameters, strict=True)):
            kinds[step, parameter.dtype, parameter.device].append(i)
        for (step, _, _), at in kinds.items():
            self._update(group, [parameters[i] for i in at], [grads[i] for i in at], [states[i] for i in at], step)

    def _start(self, parameter: Tensor) -> dict[str, Any]:
        """Make the state of a parameter that takes its first step."""
        state: dict[str, Any] = self.state[parameter]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        state["step"] = torch.tensor(0.0)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=wide, memory_format=torch.contiguous_format)
        if self.master_weights and parameter.dtype != wide:
            state["master"] = parameter.detach().to(wide)
        return state

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Any]],
        step: float,
    ) -> None:
        """Step parameters of one dtype and device that have taken the same number of steps."""
        weights, copies = parameters, []
        if parameters[0].dtype.itemsize == 2:
            weights = [s["master"] if "master" in s else p.float() for p, s in zip(parameters, states, strict=True)]
            copies = parameters
        adam_(
            weights,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            AdamStep(
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=int(step),
                decoupled=self.adam_w_mode,
                corrects_bias=group["bias_correction"],
            ),
            copies=copies,
        )
