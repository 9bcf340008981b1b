"""The functions that users call: autograd, compilation, and what the references mean in PyTorch's own words."""

import pytest
import torch
from torch.nn import functional as F

from lightning_ptdp import kernels
from lightning_ptdp.kernels.cross_entropy import cross_entropy
from lightning_ptdp.kernels.reference import dropout_add


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def rotary_angles(positions, half):
    angles = torch.randn(positions, half, dtype=torch.float64)
    return angles.cos(), angles.sin()


def turned_by_complex_numbers(x, cos, sin):
    half = cos.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


MASK = torch.tensor([[True, False, False], [False, True, False], [True, True, False]])
CAUSAL = torch.ones(3, 3, dtype=torch.bool).triu(1)
ANGLES = rotary_angles(5, 2)

# ours, PyTorch's, and the shapes of the inputs
SAME = {
    "softmax": (lambda x: kernels.scaled_softmax(x, 0.5), lambda x: (0.5 * x).softmax(-1), [(2, 3, 3)]),
    "masked softmax": (
        lambda x: kernels.scaled_masked_softmax(x, MASK),
        lambda x: x.masked_fill(MASK, float("-inf")).softmax(-1),
        [(2, 3, 3)],
    ),
    "causal softmax": (
        kernels.scaled_causal_softmax,
        lambda x: x.masked_fill(CAUSAL, float("-inf")).softmax(-1),
        [(2, 3, 3)],
    ),
    "layer norm": (kernels.layer_norm, lambda x, w, b: F.layer_norm(x, (5,), w, b), [(4, 5), (5,), (5,)]),
    "layer norm, saving its output": (
        lambda x, w, b: kernels.layer_norm(x, w, b, memory_efficient=True),
        lambda x, w, b: F.layer_norm(x, (5,), w, b),
        [(4, 5), (5,), (5,)],
    ),
    "rms norm": (kernels.rms_norm, lambda x, w: F.rms_norm(x, (5,), w, 1e-6), [(4, 5), (5,)]),
    "bias and gelu": (kernels.bias_gelu, lambda x, b: F.gelu(x + b, approximate="tanh"), [(4, 5), (5,)]),
    "swiglu": (kernels.swiglu, lambda gate, up: F.silu(gate) * up, [(4, 5), (4, 5)]),
    "bias and add": (
        lambda x, b, r: kernels.bias_dropout_add(x, b, r, 0.5, training=False),
        lambda x, b, r: r + (x + b),
        [(4, 5), (5,), (4, 5)],
    ),
    "rotary": (
        lambda x: kernels.rotary_embedding(x, *ANGLES),
        lambda x: turned_by_complex_numbers(x, *ANGLES),
        [(3, 5, 7)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["reference", "compiled where it can be"])
@pytest.mark.parametrize("name", SAME)
def test_function_is_pytorch_s_own_composition(name, dtype):
    ours, theirs, shapes = SAME[name]
    leaves = [leaf(*shape, dtype=dtype) for shape in shapes]
    found, expected = ours(*leaves), theirs(*(x.detach().double().requires_grad_() for x in leaves))
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-6}
    torch.testing.assert_close(found.double(), expected.double(), **tolerance)
    twins = [x.detach().double().requires_grad_() for x in leaves]
    direction = torch.randn(found.shape, dtype=torch.float64)
    grads = torch.autograd.grad(found, leaves, direction.to(dtype))
    for grad, twin_grad in zip(grads, torch.autograd.grad(theirs(*twins), twins, direction), strict=True):
        torch.testing.assert_close(grad.double(), twin_grad, rtol=2e-6, atol=tolerance["atol"])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy_is_that_of_pytorch(reduction, smoothing, dtype):
    logits, target = leaf(7, 61, dtype=dtype), torch.tensor([0, 60, -100, 3, 9, -100, 17])
    twin = logits.detach().double().requires_grad_()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    found, expected = cross_entropy(logits, target, **options), F.cross_entropy(twin, target, **options)
    tolerance = {"rtol": 1e-6, "atol": 1e-12 if dtype == torch.float64 else 1e-6}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    weights = torch.randn(found.shape, dtype=torch.float64)
    (found * weights.to(dtype)).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), twin.grad, **tolerance)


def test_a_target_that_is_no_class_gives_nan():
    for wrong in (5, -1):
        assert cross_entropy(torch.zeros(2, 5), torch.tensor([1, wrong])).isnan()
    assert not cross_entropy(torch.zeros(2, 5), torch.tensor([1, 5]), ignore_index=5).isnan()


def test_dropout_drops_the_share_it_is_told_to_and_keeps_the_mean():
    x, residual = torch.ones(1000, 200), torch.zeros(1000, 200)
    y = kernels.bias_dropout_add(x, None, residual, 0.3)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (y == 0).float().mean().item() == pytest.approx(0.3, abs=0.004)  # four deviations
    assert (y == 0).float().mean(0).std().item() == pytest.approx((0.21 / 1000) ** 0.5, rel=0.25)
    pairs = (y[:, :-1] == 0) & (y[:, 1:] == 0)
    assert pairs.float().mean().item() == pytest.approx(0.09, abs=0.004)


def test_dropout_follows_the_generator_and_backward_the_forward():
    x = leaf(40, 30, dtype=torch.float32)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(kernels.bias_dropout_add(x, None, torch.zeros(40, 30), 0.5))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    (grad,) = torch.autograd.grad(runs[0].sum(), x)
    assert torch.equal(grad == 0, runs[0] == 0)


def test_compiled_dropout_draws_what_the_reference_draws():
    x, residual, seed = torch.randn(7, 33), torch.randn(7, 33), torch.tensor([123])
    with kernels.references():
        torch.manual_seed(5)
        expected = kernels.bias_dropout_add(x, None, residual, 0.4)
    torch.manual_seed(5)
    torch.testing.assert_close(kernels.bias_dropout_add(x, None, residual, 0.4), expected)
    assert not torch.equal(dropout_add(x, None, residual, seed, 0.4), expected)


def test_second_derivatives_are_refused_with_a_remedy():
    if not kernels.is_compiled("cpu", torch.float32):
        pytest.skip("no kernels compiled")
    x = leaf(3, 5, dtype=torch.float32)
    (grad,) = torch.autograd.grad(kernels.bias_gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"with lightning_ptdp.kernels.references\(\)"):
        grad.sum().backward()
    with kernels.references():
        (grad,) = torch.autograd.grad(kernels.bias_gelu(x).sum(), x, create_graph=True)
        grad.sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")  # by dynamo
def test_functions_compile_into_one_graph():
    def block(x, weight, bias, cos, sin, target):
        x = kernels.layer_norm(x, weight, bias)
        x = kernels.rotary_embedding(x, cos, sin)
        x = kernels.bias_dropout_add(kernels.bias_gelu(x, bias), None, x, 0.0)
        x = kernels.scaled_causal_softmax(x, 0.5) + kernels.swiglu(x, x)
        return cross_entropy(x, target)

    arguments = (leaf(6, 6, dtype=torch.float32), leaf(6, dtype=torch.float32), leaf(6, dtype=torch.float32))
    angles = (torch.rand(6, 2), torch.rand(6, 2), torch.arange(6))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*arguments, *angles), block(*arguments, *angles)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, arguments), torch.autograd.grad(expected, arguments), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_adam_is_that_of_pytorch(decoupled, compiled):
    sizes = [(3, 5), (1,), (40, 33)]
    ours = [torch.randn(size) for size in sizes]
    theirs = [torch.nn.Parameter(x.clone()) for x in ours]
    first, second = ([torch.zeros_like(x) for x in ours] for _ in range(2))
    copies = [x.bfloat16() for x in ours]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    found_inf = torch.zeros(1)
    for step in (1, 2, 3):
        grads = [torch.randn_like(x) for x in ours]
        for x, grad in zip(theirs, grads, strict=True):
            x.grad = grad.clone()
        optimizer.step()
        numbers = kernels.AdamStep(0.01, (0.9, 0.95), 1e-8, 0.1, step, decoupled=decoupled, grad_scale=0.25)
        scaled = [grad * 4 for grad in grads]
        if compiled:
            kernels.adam_(ours, scaled, first, second, numbers, copies=copies, found_inf=found_inf)
        else:
            with kernels.references():
                kernels.adam_(ours, scaled, first, second, numbers, copies=copies, found_inf=found_inf)
    for x, y, copy in zip(ours, theirs, copies, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-6)
        assert torch.equal(copy, x.bfloat16())
    kept = [x.clone() for x in ours]
    scaled[2][39, 32] = float("nan")
    kernels.adam_(ours, scaled, first, second, numbers, found_inf=found_inf)
    assert found_inf == 1
    assert all(torch.equal(x, y) for x, y in zip(ours, kept, strict=True))


ODD = {
    "float64": lambda x: x.double(),
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("column", ["weights", "grads", "first moments", "second moments"])
def test_adam_of_odd_tensors_is_the_reference(odd, column):
    """One tensor among others that no kernel takes: all are stepped, once."""
    at = ["weights", "grads", "first moments", "second moments"].index(column)
    lists = [[torch.rand(3, 4), torch.rand(2, 5)] for _ in range(4)]
    lists[at][1] = ODD[odd](lists[at][1])
    expected = [[x.clone() for x in each] for each in lists]
    numbers = kernels.AdamStep(0.1, (0.9, 0.95), 1e-8, 0.1, 3)
    kernels.adam_(*lists, numbers)
    with kernels.references():
        kernels.adam_(*expected, numbers)
    torch.testing.assert_close(lists, expected, rtol=0, atol=0)


def test_tensors_on_another_device_are_not_passed_over():
    lists = [[torch.rand(3)] for _ in range(4)]
    lists[1] = [torch.rand(3, device="meta")]
    with pytest.raises(RuntimeError, match="meta"):
        kernels.adam_(*lists, kernels.AdamStep(0.1, (0.9, 0.95), 1e-8, 0.1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_counters_count(compiled, dtype):
    counters = [torch.tensor(3.0), torch.tensor([5.0], dtype=dtype), torch.tensor(0.0)]
    version = counters[0]._version
    if compiled:
        counts = kernels.count_(counters)
    else:
        with kernels.references():
            counts = kernels.count_(counters)
    assert counts == [counter.item() for counter in counters] == [4, 6, 1]
    assert counters[0]._version > version
    assert kernels.count_([]) == []


@pytest.mark.parametrize("compiled", [True, False])
def test_norms_and_scaling_of_lists(compiled):
    tensors = [torch.randn(3, 5), torch.randn(0), torch.randn(70001), torch.randn(4).bfloat16()]
    outputs = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
    found_inf = torch.zeros(1)
    if compiled:
        total, each = kernels.l2_norms(tensors)
        squares = kernels.sum_of_squares(tensors)
        kernels.scale_(tensors, outputs, 0.5, found_inf)
    else:
        with kernels.references():
            total, each = kernels.l2_norms(tensors)
            squares = kernels.sum_of_squares(tensors)
            kernels.scale_(tensors, outputs, 0.5, found_inf)
    expected = torch.stack([tensor.double().norm() for tensor in tensors])
    torch.testing.assert_close(each.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), expected.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(squares.sqrt(), expected.norm(), rtol=1e-6, atol=0)
    assert all(
        torch.equal(out, (tensor.float() * 0.5).bfloat16()) for out, tensor in zip(outputs, tensors, strict=True)
    )
    assert found_inf == 0
    kernels.scale_([torch.tensor([1.0, float("inf")])], [torch.empty(2)], 0.5, found_inf)
    assert found_inf == 1


def test_a_graph_that_needs_what_was_written_over_raises():
    weight = leaf(3, dtype=torch.float32)
    loss = (weight * weight).sum()
    zeros = [[torch.zeros(3)] for _ in range(3)]
    kernels.adam_([weight.detach()], *zeros, kernels.AdamStep(0.1, (0.9, 0.99), 1e-8, 0.0, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_in_the_main_gradient_s_dtype(dtype):
    main, grad, x = torch.randn(3, 5), torch.randn(2, 4, 3).to(dtype), torch.randn(2, 4, 5).to(dtype)
    expected = main.double() + grad.double().reshape(8, 3).t() @ x.double().reshape(8, 5)
    kernels.accumulate_weight_gradient(main, grad, x)
    torch.testing.assert_close(main.double(), expected, rtol=0, atol=1e-5)


BAD = {
    "mask": (lambda: kernels.scaled_masked_softmax(torch.zeros(2, 2), torch.zeros(2, 2)), "a mask is boolean"),
    "swiglu": (lambda: kernels.swiglu(torch.zeros(2), torch.zeros(3)), "gate and up have one shape"),
    "p": (lambda: kernels.bias_dropout_add(torch.zeros(2), None, torch.zeros(2), 1.5), "p is a probability"),
    "residual": (lambda: kernels.bias_dropout_add(torch.zeros(2), None, torch.zeros(3)), "have one shape and dtype"),
    "angles": (lambda: kernels.rotary_embedding(torch.zeros(2, 4), *torch.zeros(2, 2, 3)), "at most half of x's"),
    "lists": (lambda: kernels.scale_([torch.zeros(2)], [torch.zeros(3)], 1.0, torch.zeros(1)), "element by element"),
    "logits": (lambda: cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 4)), "flatten leading dims"),
    "no tensors": (lambda: kernels.l2_norms([]), "at least one tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
