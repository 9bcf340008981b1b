"""Every compiled operation against its reference in float64, at odd sizes (PO-22)."""

import pytest
import torch

from lightning_ptdp import kernels
from tests.kernels.cases import CASES, largest_error

pytestmark = pytest.mark.skipif(kernels.load().path is None, reason=f"no kernels: {kernels.load().reason}")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (2, 3), (3, 2, 7), (2, 31, 31), (5, 33), (1, 2, 3, 65), (40, 129), (70, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_reference(name, dtype):
    for shape in SHAPES:
        error, where = largest_error(torch.ops.ptdp, CASES[name], shape, dtype)
        assert error <= 1, f"{where} of shape {shape} is off by {error:.2f} tolerances"


@pytest.mark.parametrize("keys", [1, 3, 31, 33, 127, 129, 2047, 2049])
@pytest.mark.parametrize("name", ["masked softmax", "causal softmax"])
def test_softmax_of_any_number_of_keys(name, keys):
    for dtype in DTYPES:
        error, where = largest_error(torch.ops.ptdp, CASES[name], (2, 3, keys), dtype)
        assert error <= 1, f"{where} in {dtype} is off by {error:.2f} tolerances"


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_norm_of_many_rows(rows):
    for name in ("layer norm", "rms norm"):
        error, where = largest_error(torch.ops.ptdp, CASES[name], (rows, 8), torch.float32)
        assert error <= 1, f"{where} of the {name} is off by {error:.2f} tolerances"


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)])
def test_nothing_gives_nothing(shape):
    for name, case in CASES.items():
        if name not in ("rotary", "cross-entropy") or shape[-1]:
            assert largest_error(torch.ops.ptdp, case, shape, torch.float32)[0] == 0, name


@pytest.mark.parametrize("name", ["causal softmax", "layer norm", "bias and gelu", "cross-entropy"])
def test_strides_do_not_matter(name):
    case = CASES[name]
    plain = case.inputs((6, 9), torch.float32)
    strided = {key: t if t.ndim == 1 else t.t().contiguous().t() for key, t in plain.items()}
    assert not strided[next(iter(strided))].is_contiguous()
    found, expected = (case.compute(torch.ops.ptdp, tensors) for tensors in (strided, plain))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["softmax", "layer norm", "gelu", "cross-entropy"])
def test_one_nan_is_not_lost(name):
    case = CASES[name]
    for at in (0, 8, 36):
        tensors = case.inputs((2, 37), torch.float32)
        next(iter(tensors.values()))[1, at] = float("nan")
        found = case.compute(torch.ops.ptdp, tensors)
        assert any(value[1].isnan().any() for value in found.values()), f"NaN at {at}"
        assert not any(value[0].isnan().any() for value in found.values() if value.ndim == 2)


def test_results_do_not_depend_on_the_number_of_threads():
    tensors = CASES["layer norm"].inputs((300, 40), torch.float32)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(CASES["layer norm"].compute(torch.ops.ptdp, tensors))
    torch.set_num_threads(1)
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def sample_arguments():
    ops, flag = torch.ops.ptdp, torch.zeros(1)
    x, seed, vector = leaf(4, 9), torch.tensor([7]), leaf(9)
    angles = torch.randn(4, 3)
    yield ops.softmax, (leaf(2, 5, 9), torch.rand(2, 5, 9) < 0.5, 0.5, False)
    yield ops.softmax, (leaf(2, 9, 9, dtype=torch.bfloat16), None, 0.5, True)
    yield ops.softmax_backward, (torch.randn(4, 9), torch.rand(4, 9), 0.5, False)
    yield ops.norm, (x, vector, leaf(9), 1e-5, True, False)
    yield ops.norm, (leaf(4, 9, dtype=torch.bfloat16), vector, None, 1e-5, False, True)
    yield ops.bias_gelu, (x, vector)
    yield ops.bias_gelu, (torch.randn(9, 4).t().detach().requires_grad_(), None)
    yield ops.swiglu, (x, leaf(4, 9))
    yield ops.dropout_add, (x, vector, leaf(4, 9), seed, 0.4)
    yield ops.rotary, (x, angles.cos(), angles.sin(), False)
    yield ops.cross_entropy_stats, (torch.randn(4, 9),)
    yield ops.cross_entropy_gradient, (torch.randn(4, 9), torch.tensor([0, 3, -1, 8]), *torch.rand(2, 4), 0.1, 0.9)
    four = [[torch.rand(3, 5), torch.rand(7)] for _ in range(4)]
    copies = [torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.bfloat16)]
    numbers = (flag, 0.1, 0.9, 0.95, 1e-8, 0.1, 3, True, True, 0.5, True)
    yield ops.adam_, (*four, copies, *numbers)
    yield ops.adam_, ([torch.rand(3).double()], *([torch.rand(3)] for _ in range(3)), [], *numbers)
    yield ops.count_, ([torch.tensor(1.0), torch.tensor(2.0)],)
    yield ops.scale_, ([torch.rand(3)], [torch.zeros(3, dtype=torch.bfloat16)], flag, 0.5)
    yield ops.squares, ([torch.rand(3, 5), torch.rand(7)],)


@pytest.mark.slow
def test_opcheck():
    for operation, arguments in sample_arguments():
        torch.library.opcheck(operation.default, arguments)
