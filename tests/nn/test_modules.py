"""The modules are PyTorch's in all but speed."""

import pytest
import torch
from torch import nn

import lightning_ptdp.nn as pnn
from lightning_ptdp.engine.loss_weight import TargetCounter, weigh

PAIRS = {
    "LayerNorm": (pnn.LayerNorm(6), nn.LayerNorm(6)),
    "LayerNorm without bias": (pnn.LayerNorm(6, bias=False, memory_efficient=True), nn.LayerNorm(6, bias=False)),
    "LayerNorm of two dims": (pnn.LayerNorm((4, 6)), nn.LayerNorm((4, 6))),
    "RMSNorm": (pnn.RMSNorm(6), nn.RMSNorm(6)),
    "RMSNorm, plain": (pnn.RMSNorm(6, elementwise_affine=False), nn.RMSNorm(6, elementwise_affine=False)),
    "GELU": (pnn.GELU(), nn.GELU(approximate="tanh")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PAIRS)
def test_module_is_pytorch_s(name, dtype):
    ours, theirs = (module.to(dtype) for module in PAIRS[name])
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=1.0)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, type(theirs)) or name == "GELU"
    x = torch.randn(2, 4, 6, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0 if dtype == torch.float64 else 2e-6)


def test_swiglu_takes_halves_or_a_pair():
    x = torch.randn(2, 3, 8)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(pnn.SwiGLU()(x), nn.functional.silu(gate) * up)
    assert torch.equal(pnn.SwiGLU()(x), pnn.SwiGLU()(gate, up))


def test_dropout_acts_in_training_only():
    module, x = pnn.BiasDropoutAdd(0.5), torch.ones(10, 10)
    assert not torch.equal(module.train()(x, x), 2 * x)
    assert torch.equal(module.eval()(x, x, torch.ones(10)), 3 * x)


def test_norms_give_the_input_s_dtype_under_autocast_too():
    x = torch.randn(2, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert pnn.LayerNorm(6)(x).dtype == torch.bfloat16


def test_the_loss_is_seen_by_what_weighs_microbatches():
    counter = TargetCounter()
    counter.start()
    loss = pnn.functional.cross_entropy(torch.randn(4, 5, requires_grad=True), torch.tensor([0, -100, 2, -100]))
    counter.stop()
    assert weigh(loss, counter.calls, num_samples=4).value == 2
