"""Adam over lists of tensors: apex.optimizers.FusedAdam."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.kernels import AdamStep, adam_


class FusedAdam(Optimizer):
    """Adam, or AdamW (adam_w_mode), with all parameters of a device and dtype in one kernel.

    Moments are float32, and the state of a parameter has the names of torch.optim.AdamW's: step, exp_avg, exp_avg_sq;
    with master_weights also master, the float32 weight of a 16-bit parameter.

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW.
        bias_correction: divide moments by 1 - beta^step.
        adam_w_mode: decay the weight itself; else add it to the gradient.
        set_grad_none: `zero_grad` removes gradients.
        master_weights: keep a float32 weight for each 16-bit parameter.

    Raises:
        ValueError: amsgrad or capturable, which these kernels don't have.
    """

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

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for (_, _, step), parameters in self._alike(group).items():
                self._update(group, parameters, step)
        return loss

    def _alike(self, group: dict[str, Any]) -> dict[tuple[torch.device, torch.dtype, int], list[Tensor]]:
        """Parameters with a gradient, by device, dtype and the number of the step."""
        found: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise ValueError("FusedAdam takes dense gradients; use torch.optim.SparseAdam for sparse ones")
            state = self._state_of(parameter)
            state["step"] += 1
            found[parameter.device, parameter.dtype, int(state["step"])].append(parameter)
        return found

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
            if self.master_weights and parameter.dtype != torch.float32:
                state["master"] = parameter.detach().float()
        return state

    def _update(self, group: dict[str, Any], parameters: list[Tensor], step: int) -> None:
        states = [self.state[parameter] for parameter in parameters]
        has_32_bits = parameters[0].dtype == torch.float32
        weights = [
            parameter.detach() if has_32_bits else state.get("master", parameter.detach().float())
            for parameter, state in zip(parameters, states, strict=True)
        ]
        adam_(
            weights,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            AdamStep(
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                decoupled=self.adam_w_mode,
                corrects_bias=group["bias_correction"],
            ),
            copies=() if has_32_bits else [parameter.detach() for parameter in parameters],
        )
