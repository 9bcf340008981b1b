"""The CUDA kernels on a GPU: `make gpu-check` runs this. Every test skips itself where there is no device."""

import pytest
import torch

from lightning_ptdp import kernels
from tests.gpu.once import OnDevice
from tests.kernels.cases import CASES, largest_error
from tests.kernels.test_operations import sample_arguments

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (3, 2, 7), (2, 31, 31), (5, 33), (40, 129), (70, 256), (2, 3, 2049), (65537, 8)]


@pytest.fixture(autouse=True)
def compiled():
    library = kernels.load()
    assert library.has_cuda, f"there is a GPU, and no kernels for it: {library.reason}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_reference(name, dtype):
    for shape in SHAPES:
        error, where = largest_error(torch.ops.ptdp, OnDevice(CASES[name]), shape, dtype)
        assert error <= 1, f"{where} of shape {shape} is off by {error:.2f} tolerances"


def to_device(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cuda().requires_grad_(value.requires_grad)
    return [to_device(item) for item in value] if isinstance(value, list) else value


def test_opcheck():
    for operation, arguments in sample_arguments():
        torch.library.opcheck(operation.default, tuple(to_device(argument) for argument in arguments))


def test_kernels_run_on_the_current_stream_and_in_graphs():
    x = torch.randn(64, 128, device="cuda")
    expected = kernels.scaled_softmax(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = kernels.scaled_softmax(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.scaled_softmax(x)
    x.mul_(2)
    graph.replay()
    assert torch.equal(captured, kernels.scaled_softmax(x))


def test_weight_gradients_are_added_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        main, grad, x = (
            torch.randn(24, 40).cuda(),
            torch.randn(64, 24).to(dtype).cuda(),
            torch.randn(64, 40).to(dtype).cuda(),
        )
        expected = main.double() + grad.double().t() @ x.double()
        kernels.accumulate_weight_gradient(main, grad, x)
        torch.testing.assert_close(main.double(), expected, rtol=1e-5, atol=1e-4)
