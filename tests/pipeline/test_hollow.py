import pytest
import torch
from torch import nn

from lightning_ptdp.pipeline.hollow import HollowParameters, ShapeTwin, nan_like

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Parameters and buffers whose order is easy to lose."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))
        self.register_buffer("mean", torch.zeros(2))
        self.inner = nn.Linear(2, 2)
        self.inner.weight.requires_grad_(False)


def names(module):
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def test_hollow_tensor_costs_one_element_and_is_nan():
    value = nan_like(torch.zeros(1000, 1000, dtype=torch.bfloat16), CPU)
    assert (value.shape, value.dtype, value.stride()) == ((1000, 1000), torch.bfloat16, (0, 0))
    assert value.untyped_storage().nbytes() == 2
    assert value.isnan().all()


def test_hollow_whole_numbers_are_zero():
    assert nan_like(torch.ones(3, dtype=torch.long), CPU).tolist() == [0, 0, 0]


def test_hollow_parameters_are_attributes_outside_and_parameters_inside():
    module = Mixed()
    plain = names(module)
    hollow = HollowParameters(module, ["b", "inner.weight", "mean"], CPU)
    assert names(module) == ["a", "c", "inner.bias"]
    assert "mean" not in dict(module.named_buffers())
    assert module.b.isnan().all()
    assert module.mean.isnan().all()
    hollow.register()
    assert names(module) == plain
    assert {name for name, p in module.named_parameters() if p in hollow.parameters} == {"b", "inner.weight"}
    assert not module.inner.weight.requires_grad, "as it was"
    hollow.unregister()
    assert names(module) == ["a", "c", "inner.bias"]


def test_using_what_is_hollow_gives_nan_instead_of_a_number():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    HollowParameters(module, ["0.bias"], CPU)
    assert module(torch.ones(1, 2)).isnan().all()


def test_parameter_under_two_names_stays_one_object():
    module = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    module["head"].weight = module["embed"].weight
    hollow = HollowParameters(module, ["embed.weight", "head.weight"], CPU)
    hollow.register()
    assert module["head"].weight is module["embed"].weight
    assert len(hollow.parameters) == 1


class Counting(nn.Module):
    """Counts its calls, and returns a structure."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 5), []

    def forward(self, x, *, scale=1):
        self.calls.append(x.device.type)
        return {"y": self.linear(x) * scale, "index": torch.arange(len(x), device=x.device), "scale": scale}


def test_twin_answers_in_shapes_filled_with_nan():
    answer = ShapeTwin(Counting())(torch.ones(2, 3))
    assert (answer["y"].shape, answer["y"].dtype, answer["y"].device.type) == ((2, 5), torch.float32, "cpu")
    assert answer["y"].isnan().all()
    assert answer["index"].tolist() == [0, 0]
    assert answer["scale"] == 1


def test_answers_of_a_twin_can_be_written_to():
    """Some models add to what their embedding returns in place."""
    answer = ShapeTwin(nn.Linear(3, 5))(torch.ones(2, 3))
    answer[0] = 1.0
    assert answer[1].isnan().all()


def test_twin_runs_once_for_each_shape():
    module = Counting()
    twin = ShapeTwin(module)
    for rows in (2, 2, 4, 2):
        assert len(twin(torch.ones(rows, 3))["y"]) == rows
    twin(torch.ones(2, 3), scale=2)
    assert twin._module.calls == ["meta", "meta", "meta"]
    assert module.calls == [], "the module itself never runs"


def test_answers_of_a_twin_share_no_memory():
    twin = ShapeTwin(nn.Linear(3, 5))
    first = twin(torch.ones(2, 3))
    first.zero_()
    assert twin(torch.ones(2, 3)).isnan().all()


def test_twin_with_inputs_that_cannot_be_hashed_runs_each_time():
    class Listed(nn.Module):
        def forward(self, x, sizes):
            return x[: len(sizes.values)]

    class Unhashable:
        __hash__ = None

        def __init__(self, values):
            self.values = values

    twin = ShapeTwin(Listed())
    assert [len(twin(torch.ones(4), Unhashable([0] * n))) for n in (1, 3)] == [1, 3]


@pytest.mark.parametrize("training", [True, False])
def test_twin_leaves_the_module_as_it_is(training):
    module = nn.BatchNorm1d(3).train(training)
    ShapeTwin(module)(torch.ones(4, 3))
    assert module.training is training
    assert module.running_mean.tolist() == [0, 0, 0]
