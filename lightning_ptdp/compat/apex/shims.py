"""Lets `import apex` find this package, for code that cannot be changed; done only when a user asks."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from lightning_ptdp.kernels.status import find_apex

_HERE = __package__ or "lightning_ptdp.compat.apex"
_MODULES = {
    "apex": _HERE,
    "apex.optimizers": f"{_HERE}.optimizers",
    "apex.normalization": f"{_HERE}.normalization",
    "apex.normalization.fused_layer_norm": f"{_HERE}.normalization",
    "apex.multi_tensor_apply": f"{_HERE}.multi_tensor_apply",
    **{
        name: f"{_HERE}.{name}"
        for name in (
            "amp_C",
            "scaled_softmax_cuda",
            "scaled_masked_softmax_cuda",
            "scaled_upper_triang_masked_softmax_cuda",
            "fused_weight_gradient_mlp_cuda",
        )
    },
}


def install_apex_shims() -> dict[str, ModuleType]:
    """Put these modules into sys.modules under Apex's names; returns what was put there.

    Megatron-LM then takes Apex to be present.

    Raises:
        RuntimeError: a package of the name apex is installed or imported.
    """
    kind = find_apex()
    is_ours = getattr(sys.modules.get("apex"), "__name__", "") == _HERE
    if kind != "absent" and not is_ours:
        what = "NVIDIA Apex" if kind == "nvidia" else "a package called apex that is not NVIDIA's"
        raise RuntimeError(f"{what} is installed, and the shims would hide it; uninstall it, or import {_HERE} by name")
    modules = {name: import_module(target) for name, target in _MODULES.items()}
    sys.modules.update(modules)
    return modules
