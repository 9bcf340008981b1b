"""Apex's names do what Apex's documentation says, and take nobody's place unasked."""

import pickle
import sys
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp.compat import apex


def trained(make, dtype=torch.float32, steps=3, **options):
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in [(3, 5), (4,)]]
    optimizer = make(parameters, **options)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_is_adam(adam_w_mode):
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    ours, _ = trained(apex.FusedAdam, adam_w_mode=adam_w_mode, **options)
    theirs, _ = trained(torch.optim.AdamW if adam_w_mode else torch.optim.Adam, **options)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_its_state_goes_on_in_pytorch_s_adamw():
    ours, optimizer = trained(apex.FusedAdam)
    other = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in ours])
    other.load_state_dict({**other.state_dict(), "state": deepcopy(optimizer.state_dict()["state"])})
    for parameter, twin in zip(ours, other.param_groups[0]["params"], strict=True):
        parameter.grad = torch.ones_like(parameter)
        twin.grad = torch.ones_like(twin)
    optimizer.param_groups[0]["weight_decay"] = 0.01
    optimizer.step()
    other.step()
    for parameter, twin in zip(ours, other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(parameter, twin, rtol=0, atol=1e-6)


def test_master_weights_keep_what_16_bits_lose():
    options = {"lr": 1e-4, "weight_decay": 0.0, "steps": 20}
    with_master, optimizer = trained(apex.FusedAdam, torch.bfloat16, master_weights=True, **options)
    plain, _ = trained(apex.FusedAdam, torch.bfloat16, **options)
    exact, _ = trained(torch.optim.Adam, torch.float32, **options)
    for parameter in with_master:
        assert torch.equal(parameter, optimizer.state[parameter]["master"].bfloat16())
    moved = [
        [(p.float() - q).abs().sum().item() for p, q in zip(run, exact, strict=True)] for run in (with_master, plain)
    ]
    assert sum(moved[0]) <= sum(moved[1])


def replaced(optimizer):
    state = optimizer.state[optimizer.param_groups[0]["params"][1]]
    state.update(exp_avg=state["exp_avg"] * 2, exp_avg_sq=state["exp_avg_sq"] + 1, step=state["step"] + 5)
    return optimizer


def written_over(optimizer):
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg"].mul_(2)
    state["step"].fill_(7)
    return optimizer


def given_other_parameters(optimizer):
    """As the strategy does where an optimizer steps main weights."""
    group = optimizer.param_groups[0]
    others = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    for old, new in zip(group["params"], others, strict=True):
        optimizer.state[new] = {name: value.clone() for name, value in optimizer.state.pop(old, {}).items()}
    group["params"] = others
    return optimizer


def given_a_group(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))], "lr": 0.1})
    return optimizer


def without_a_gradient(optimizer):
    optimizer.param_groups[0]["params"][0].requires_grad_(False)
    optimizer.param_groups[0]["params"][0].grad = None
    return optimizer


def with_a_gradient_later(optimizer):
    optimizer.param_groups[0]["params"][2].requires_grad_(True)
    return optimizer


def given_other_storage(optimizer):
    first = optimizer.param_groups[0]["params"][0]
    first.grad, first.data = None, first.detach().t().contiguous().t()
    return optimizer


def mixed(optimizer):
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(6, dtype=torch.float64)))
    return optimizer


def loaded(optimizer):
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    return replaced(optimizer)


@pytest.mark.parametrize(
    "change",
    [
        loaded,
        replaced,
        written_over,
        given_other_parameters,
        given_a_group,
        without_a_gradient,
        with_a_gradient_later,
        given_other_storage,
        mixed,
        deepcopy,
        lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    ],
)
def test_what_changes_between_steps_counts(change):
    """After two steps an optimizer is changed, or exchanged for the result; then it goes on as PyTorch's AdamW."""
    optimizers = []
    for make in (apex.FusedAdam, partial(torch.optim.AdamW, foreach=False)):
        generator = torch.Generator().manual_seed(3)
        optimizer = make([nn.Parameter(torch.ones(size)) for size in [(3, 5), (4,), (2,)]], lr=0.01, weight_decay=0.1)
        optimizer.param_groups[0]["params"][2].requires_grad_(False)
        for step in range(4):
            optimizer = change(optimizer) if step == 2 else optimizer
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            optimizer.step()
        optimizers.append(optimizer)
    ours, theirs = ([p for group in each.param_groups for p in group["params"]] for each in optimizers)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        torch.testing.assert_close(optimizers[0].state.get(p, {}), optimizers[1].state.get(q, {}), rtol=0, atol=1e-6)


def test_sparse_gradients_are_refused_before_anything_is_done():
    parameters, optimizer = trained(apex.FusedAdam)
    before = deepcopy(optimizer.state_dict())
    parameters[1].grad = torch.zeros(4).to_sparse()
    with pytest.raises(ValueError, match="takes dense gradients"):
        optimizer.step()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_what_fused_adam_lacks_is_refused():
    for option in ("amsgrad", "capturable"):
        with pytest.raises(ValueError, match="has neither amsgrad nor capturable"):
            apex.FusedAdam([nn.Parameter(torch.zeros(1))], **{option: True})


def test_norms():
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(3, 4), torch.randn(3, 4)
    expected = F.layer_norm(x, (3, 4), weight, bias, 1e-5)
    torch.testing.assert_close(apex.FusedLayerNormAffineFunction.apply(x, weight, bias, (3, 4), 1e-5), expected)
    for kind, theirs in [(apex.FusedLayerNorm, nn.LayerNorm), (apex.FusedRMSNorm, nn.RMSNorm)]:
        torch.testing.assert_close(kind(4, memory_efficient=True)(x), theirs(4, eps=1e-5)(x))
    assert apex.MixedFusedLayerNorm(4)(x.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match="names the last dims"):
        apex.FusedLayerNormAffineFunction.apply(x, weight, bias, (2, 4), 1e-5)


def test_lists_of_tensors():
    flag, tensors = torch.zeros(1, dtype=torch.int32), [torch.randn(5), torch.randn(2, 3)]
    out = [torch.empty_like(tensor) for tensor in tensors]
    apex.multi_tensor_applier(apex.amp_C.multi_tensor_scale, flag, [tensors, out], 0.5)
    assert all(torch.equal(a, b * 0.5) for a, b in zip(out, tensors, strict=True))
    assert flag == 0
    total, each = apex.multi_tensor_applier(apex.amp_C.multi_tensor_l2norm, flag, [tensors], True)
    torch.testing.assert_close(each, torch.stack([tensor.norm() for tensor in tensors]))
    torch.testing.assert_close(total, each.norm().view(1))
    unscaled, _ = apex.amp_C.multi_tensor_unscale_l2norm(1, flag, [tensors], torch.tensor([0.5]))
    torch.testing.assert_close(unscaled, total / 2)
    tensors[1][0, 0] = float("inf")
    apex.multi_tensor_applier(apex.amp_C.multi_tensor_scale, flag, [tensors, out], 0.5)
    assert flag == 1


def test_adam_over_lists():
    weights, grads, first, second = ([torch.ones(3), torch.ones(2)] for _ in range(4))
    apex.amp_C.multi_tensor_adam(1, None, [grads, weights, first, second], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    torch.testing.assert_close(weights[0], torch.full((3,), 1 - 0.1 * (1 / 0.1) / (1 / 0.01) ** 0.5))


@pytest.mark.parametrize("kind", ["plain", "masked", "causal"])
def test_softmax_modules(kind):
    x, grad, scale = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(2, 3, 5, 5), torch.tensor([0.5])
    mask = torch.rand(2, 1, 5, 5) < 0.3
    mask[..., 0] = False
    module, arguments, hidden = {
        "plain": (apex.scaled_softmax_cuda, (x,), torch.zeros(5, 5, dtype=torch.bool)),
        "masked": (apex.scaled_masked_softmax_cuda, (x, mask), mask),
        "causal": (apex.scaled_upper_triang_masked_softmax_cuda, (x,), torch.ones(5, 5, dtype=torch.bool).triu(1)),
    }[kind]
    expected = (0.5 * x).masked_fill(hidden, float("-inf")).softmax(-1)
    y = module.forward(*arguments, scale[0])
    torch.testing.assert_close(y, expected)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    torch.testing.assert_close(module.backward(grad, y, scale[0]), expected_grad)


def test_weight_gradients():
    main, x, grad = torch.ones(3, 5), torch.randn(2, 4, 5), torch.randn(2, 4, 3)
    apex.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, grad, main)
    torch.testing.assert_close(main, 1 + grad.reshape(8, 3).t() @ x.reshape(8, 5))


def test_importing_takes_no_name_of_apex():
    assert not {"apex", "amp_C"} & sys.modules.keys()


def test_shims_come_when_asked(monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    modules = apex.install_apex_shims()
    assert modules["apex.optimizers"].FusedAdam is apex.FusedAdam
    assert sys.modules["amp_C"] is apex.amp_C
    assert apex.install_apex_shims().keys() == modules.keys()


def test_shims_hide_no_other_apex(tmp_path, monkeypatch):
    (tmp_path / "apex.py").write_text("raise ImportError('a web toolkit')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="a package called apex that is not NVIDIA's is installed"):
        apex.install_apex_shims()
