"""The kernels that this machine wouldn't choose: of lesser instruction sets, and CUDA's, emulated on the CPU.

"Emulated" is no run on a GPU: tests/kernels/emulation.h says what it can show and what it cannot.
"""

import shutil
from pathlib import Path

import pytest
import torch

from lightning_ptdp.kernels import build
from tests.kernels.cases import CASES, largest_error
from tests.kernels.tables import cpu_table, cuda_object, emulated_table, linked_with_cuda, operations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build kernels"),
]

CPU_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
LEVELS = [
    "baseline",
    pytest.param("avx2", marks=pytest.mark.skipif(" avx2 " not in CPU_FLAGS, reason="no AVX2 on this machine")),
    pytest.param("avx512", marks=pytest.mark.skipif(" avx512bw " not in CPU_FLAGS, reason="no AVX512 on this machine")),
]
EMULATED_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("level", LEVELS)
def test_instruction_set(level):
    ops = operations(*cpu_table(level))
    assert ops.instruction_set() == level
    for name, case in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in [(2, 3), (3, 31), (2, 5, 65)]:
                error, where = largest_error(ops, case, shape, dtype)
                assert error <= 1, f"{where} of {name}, {shape} in {dtype}, is off by {error:.2f} tolerances"


@pytest.mark.parametrize("name", CASES)
def test_emulated_cuda_kernels_compute_the_reference(name):
    ops = operations(*emulated_table())
    for shape, dtypes in [((2, 3), [torch.float32]), ((3, 65), EMULATED_DTYPES), ((35, 7), [torch.float32])]:
        for dtype in dtypes:
            error, where = largest_error(ops, CASES[name], shape, dtype)
            assert error <= 1, f"{where} of shape {shape} in {dtype} is off by {error:.2f} tolerances"


def test_emulated_cuda_kernels_on_lists_of_tensors():
    ops = operations(*emulated_table())
    sizes = [1, 70, 65536 + 3, *([2] * 45)]  # more chunks than one launch takes
    grads, weights, first, second = ([torch.rand(size) for size in sizes] for _ in range(4))
    expected = [0.9 * m + 0.1 * 0.5 * g for m, g in zip(first, grads, strict=True)]
    flag = torch.zeros(1)
    copies = [torch.zeros(size, dtype=torch.float16) for size in sizes]
    ops.adam_(weights, grads, first, second, copies, flag, 0.1, 0.9, 0.95, 1e-8, 0.1, 3, True, True, 0.5, True)
    torch.testing.assert_close(first, expected)
    assert all(torch.equal(copy, weight.half()) for copy, weight in zip(copies, weights, strict=True))
    assert flag == 0
    torch.testing.assert_close(
        ops.squares(grads).sum(), sum(g.double().square().sum() for g in grads), rtol=1e-6, atol=0
    )
    grads[2][-1] = float("inf")
    before = [weight.clone() for weight in weights]
    ops.adam_(weights, grads, first, second, [], flag, 0.1, 0.9, 0.95, 1e-8, 0.1, 3, True, True, 0.5, True)
    assert flag == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))


# file, what stands there, what stands there instead, the case that must notice
MUTANTS = {
    "first barrier left out": ("common.cuh", "shared[warp] = v;\n  __syncthreads();", "shared[warp] = v;", "softmax"),
    "second barrier left out": ("common.cuh", "  __syncthreads();  // before", "  // before", "layer norm"),
    "causal mask off by one": ("softmax.cuh", "j < seen && !is_masked", "j <= seen && !is_masked", "causal softmax"),
    "stride of half a block": ("common.cuh", "j += blockDim.x)", "j += blockDim.x * 2)", "gelu"),
    "last row of a part left out": ("norm.cuh", "row < a.parts.last(part)", "row + 1 < a.parts.last(part)", "rms norm"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_emulation_notices(name):
    file, right, wrong, case = MUTANTS[name]

    def edit(folder: Path) -> None:
        path = folder / "cuda" / file
        assert right in path.read_text()
        path.write_text(path.read_text().replace(right, wrong))

    ops = operations(*emulated_table(edit))
    shapes = [(40, 101), (36, 65), (5, 9), (3, 3)]
    assert any(largest_error(ops, CASES[case], shape, torch.float32)[0] > 1 for shape in shapes for _ in range(2))


@pytest.mark.skipif(build.nvcc() is None, reason="needs nvcc to compile the CUDA kernels")
def test_cuda_kernels_compile_within_registers(tmp_path):
    """For compute capabilities 8.0, 9.0 and 10.0; what a kernel takes more than 64 registers of is too much of."""
    _, listing = cuda_object()
    usage = [line for line in listing.splitlines() if "registers" in line or "spill" in line]
    assert len([line for line in usage if "registers" in line]) >= 3 * 44
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in usage if "spill" in line)
    assert max(int(line.split("Used ")[1].split(" registers")[0]) for line in usage if "registers" in line) <= 64


@pytest.mark.skipif(build.nvcc() is None, reason="needs nvcc to compile the CUDA kernels")
def test_library_with_cuda_loads_where_pytorch_has_none():
    """The whole library as a wheel for CUDA carries it: it links, loads, and runs its CPU kernels."""
    torch.ops.load_library(str(linked_with_cuda("ptdp_linked")))
    assert torch.ops.ptdp_linked.has_cuda() == (torch.version.cuda is not None)
    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.ops.ptdp_linked.softmax(x, None, 1.0, False), x.softmax(-1))
