"""What is put off gives the values of what runs at once; random operations give the same, whatever else is computed."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp.deferred_init import DeferredInit

SEED = 3


def deferred(make):
    """The module that `make` fills, and what knows its values."""
    module = nn.Module()
    init = DeferredInit(module, SEED)
    with init.recording():
        make(module)
    return module, init


def built(make):
    """The module that `make` fills, with values."""
    module, init = deferred(make)
    init.make_hollow(module)
    init.fill(module, lambda _: True)
    return module


def rotary(module):
    frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)
    angles = torch.outer(torch.arange(16), frequencies)
    module.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
    module.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))
    module.cached = {"sin": [angles.sin()]}
    module.original = module.cos


def sinusoids(module):
    table = np.array([[position / 10000 ** (i // 2 / 4) for i in range(8)] for position in range(16)])
    weight = nn.Embedding(16, 8).weight
    weight.requires_grad = False
    weight[:, 0::2] = torch.FloatTensor(np.sin(table[:, 0::2]))
    weight[:, 1::2] = torch.from_numpy(np.cos(table[:, 1::2]))
    weight.detach_()
    module.weight = nn.Parameter(weight, requires_grad=False)


def masks(module):
    module.register_buffer("causal", torch.tril(torch.ones(4, 4, dtype=torch.bool)).view(1, 1, 4, 4))
    bias = torch.zeros(4, 4)
    bias[torch.triu(torch.ones(4, 4), 1) > 0] = float("-inf")
    bias.masked_fill_(torch.eye(4, dtype=torch.bool), 2.0)
    module.register_buffer("bias", bias.t())


def constants(module):
    module.scale = nn.Parameter(torch.ones(3) * 0.5)
    module.register_buffer("steps", torch.tensor(0))
    module.register_buffer("slopes", torch.tensor([2.0**-i for i in range(4)], device=module.scale.device))
    module.register_buffer("shifted", module.slopes + module.scale.new_tensor([0.25])[0] * 2)
    with torch.no_grad():
        module.scale[1:].fill_(3.0)
        module.scale.mul_(module.scale.new_full((3,), 2.0))


def read_back(module):
    rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
    module.rates = nn.Parameter(torch.tensor(rates))
    chosen = torch.arange(10)[torch.arange(10) % 3 == 0]
    module.register_buffer("chosen", chosen)
    module.register_buffer("doubled", torch.from_numpy(2 * torch.arange(3).numpy()))
    module.register_buffer("listed", torch.tensor(torch.eye(2).tolist()))
    assert torch.equal(torch.zeros(2), torch.zeros(2))
    assert bool((torch.ones(2) > 0).all())


def copies(module):
    layer = nn.Linear(4, 4)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    module.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
    module.layers[1].weight.data = layer.weight.data + 1
    module.norm = nn.BatchNorm1d(4)
    module.tied = module.layers[0].weight
    module.halves = nn.ParameterList([layer.bias.data[:2], layer.bias.data[2:]])
    module.layers[0].load_state_dict(module.layers[1].state_dict())
    module.kernel = nn.Parameter(torch.Tensor(2, 2, 3))
    nn.init.dirac_(module.kernel)


def dtypes(module):
    torch.set_default_dtype(torch.float64)
    module.wide = nn.Parameter(torch.arange(4) / 3)
    torch.set_default_dtype(torch.float32)
    module.narrow = nn.Parameter(torch.arange(4) / 3)
    module.sixteen = nn.Parameter((torch.arange(4) / 3).to(torch.bfloat16))
    module.register_buffer(
        "counted", torch.zeros(3, dtype=torch.long).index_add_(0, torch.tensor([1, 1]), torch.ones(2).long())
    )


def decompositions(module):
    matrix = torch.arange(9.0).view(3, 3) + torch.eye(3)
    q, r = torch.linalg.qr(matrix)
    values, places = torch.sort(matrix.flatten(), descending=True)
    module.w = nn.Parameter(torch.empty(3))
    nn.init.constant_(module.w, 2.0)
    for name, tensor in {"q": q, "r": r, "values": values, "places": places}.items():
        module.register_buffer(name, tensor)
    module.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    nn.utils.parametrizations.weight_norm(module)


@pytest.mark.parametrize(
    "make",
    [rotary, sinusoids, masks, constants, read_back, copies, dtypes, decompositions],
    ids=lambda make: make.__name__,
)
def test_what_draws_nothing_has_the_values_of_plain(make):
    expected, module = nn.Module(), built(make)
    make(expected)
    tensors, others = (
        dict(m.named_parameters(remove_duplicate=False)) | dict(m.named_buffers(remove_duplicate=False))
        for m in (expected, module)
    )
    assert list(tensors) == list(others)
    for name, value in tensors.items():
        other = others[name]
        assert (other.dtype, other.stride(), other.requires_grad) == (value.dtype, value.stride(), value.requires_grad)
        assert type(other) is type(value)
        torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)
    assert list(module.state_dict()) == list(expected.state_dict())


def test_tensors_that_are_plain_attributes_are_filled():
    module, expected = built(rotary), nn.Module()
    rotary(expected)
    assert torch.equal(module.cached["sin"][0], expected.cached["sin"][0])
    assert module.original is module.cos


INITS = {
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.5),
    "bernoulli": lambda w: w.data.bernoulli_(0.5),
    "integers": lambda w: w.data.random_(0, 10),
    "exponential": lambda w: w.data.exponential_(),
    "functional": lambda w: w.data.copy_(torch.randn(w.shape) + torch.rand_like(w) + torch.randint(3, w.shape)),
    "a part": lambda w: w.data[1:].normal_(),
    "columns": lambda w: w.data.t().uniform_(),
    "permuted": lambda w: w.data.copy_(w.data[torch.randperm(len(w))]),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
def test_a_parameter_alone_is_what_it_is_among_all(init):
    def make(module):
        for i in range(3):
            layer = nn.Linear(8, 6, bias=False)
            init(layer.weight)
            module.add_module(str(i), layer)

    before = torch.get_rng_state()
    whole = built(make)
    names = ["2", "0", "1"]
    for name in names:
        module, only = deferred(make)
        only.make_hollow(module)
        alone = only.take(getattr(module, name).weight)
        assert torch.equal(alone, getattr(whole, name).weight)
        assert alone.is_contiguous()
    assert len({tuple(getattr(whole, name).weight.flatten().tolist()) for name in names}) == len(names)
    assert torch.equal(torch.get_rng_state(), before)


def squared_norms_are_one(weight):
    torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)))


def is_truncated(weight):
    torch.testing.assert_close(weight.std(), torch.tensor(0.4398), rtol=0.02, atol=0)
    assert 0.9 < weight.abs().max() <= 1


def is_half_empty(weight):
    torch.testing.assert_close((weight == 0).sum(0), torch.full((256,), 128))


@pytest.mark.parametrize(
    ("init", "check"),
    [
        (nn.init.orthogonal_, squared_norms_are_one),
        (lambda w: nn.init.trunc_normal_(w, std=0.5, a=-1.0, b=1.0), is_truncated),
        (lambda w: nn.init.sparse_(w, 0.5), is_half_empty),
    ],
    ids=["orthogonal", "truncated", "sparse"],
)
def test_initialisers_that_do_nothing_on_the_meta_device_are_run(init, check):
    def make(module):
        module.linear = nn.Linear(256, 256)
        init(module.linear.weight)
        assert not module.linear.weight.is_meta
        assert module.linear.weight.device.type == "cpu"

    check(built(make).linear.weight.detach())


class Counted(TorchDispatchMode):
    """Counts random operations."""

    def __init__(self):
        super().__init__()
        self.draws = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **kwargs or {})


def test_an_initialisation_that_is_overwritten_is_not_run():
    def make(module):
        module.linear = nn.Linear(4, 4)
        module.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)

    module, init = deferred(make)
    init.make_hollow(module)
    with Counted() as counted:
        init.fill(module, lambda _: True)
    assert counted.draws == 2  # the weight's second one, and the bias's


def test_what_was_built_before_is_left_as_it_is():
    module = nn.Module()
    module.before = nn.Linear(2, 2)
    weight = module.before.weight.clone()
    init = DeferredInit(module, SEED)
    with init.recording():
        module.tied = nn.Linear(2, 2)
        module.tied.weight = module.before.weight
        nn.init.zeros_(module.before.bias)
        module.scaled = nn.Parameter(module.before.weight.data * 2)
        module.before.bias.data.add_(torch.ones(2))
    init.make_hollow(module)
    init.fill(module, lambda _: True)
    assert init.faults(module) == [init.faults(module)[0]]  # all is filled: nothing is deferred any more
    assert module.tied.weight is module.before.weight
    assert torch.equal(module.before.weight, weight)
    assert torch.equal(module.before.bias, torch.ones(2))
    assert torch.equal(module.scaled, weight * 2)


def own_generator(module):
    module.w = nn.Parameter(torch.empty(2).normal_(generator=torch.Generator()))


def file(module):
    saved = io.BytesIO(_SAVED)
    module.w = nn.Parameter(torch.load(saved))


def large_copy(module):
    module.w = nn.Parameter(torch.empty(5000, 5000))
    module.w.data.copy_(_LARGE)


def meta(module):
    module.w = nn.Parameter(_ON_META * 2)


_buffer = io.BytesIO()
torch.save(torch.ones(2), _buffer)
_SAVED = _buffer.getvalue()
_LARGE = torch.zeros(()).expand(5000, 5000)
_ON_META = torch.empty(2, device="meta")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (own_generator, "draws from a generator of its own"),
        (file, "gives a tensor other storage, as loading from a file does"),
        (large_copy, "copies values from tensors that were made elsewhere"),
        (meta, "was built on the meta device before and holds no values"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_put_off_is_refused_with_a_remedy(make, said):
    with pytest.raises(ValueError, match=said) as raised:
        deferred(make)
    assert "configure_model" in str(raised.value) + str(raised.value.__notes__)
    assert "init='plain'" in raised.value.__notes__[0]
