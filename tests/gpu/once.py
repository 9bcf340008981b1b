"""Runs every case once on the GPU, for compute-sanitizer: python -m tests.gpu.once."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_ptdp import kernels
from tests.kernels.cases import CASES, Case, Tensors, largest_error


@dataclass(frozen=True)
class OnDevice:
    """A case whose inputs lie on the GPU; what is expected is worked out on the CPU."""

    case: Case

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensors:
        return {name: tensor.cuda() for name, tensor in self.case.inputs(shape, dtype).items()}

    def compute(self, ops: Any, tensors: Tensors) -> Tensors:
        return {name: tensor.cpu() for name, tensor in self.case.compute(ops, tensors).items()}

    def expect(self, tensors: Tensors) -> Tensors:
        return self.case.expect({name: tensor.cpu() for name, tensor in tensors.items()})


def main() -> None:
    library = kernels.load()
    assert library.has_cuda, library.reason
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shape in [(3, 5), (2, 33, 65), (70, 300)]:
                error, where = largest_error(torch.ops.ptdp, OnDevice(case), shape, dtype)
                assert error <= 1, f"{where} of {name}, {shape} in {dtype}, is off by {error:.2f} tolerances"


if __name__ == "__main__":
    main()
