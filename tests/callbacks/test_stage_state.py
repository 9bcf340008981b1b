from collections import deque

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from lightning_ptdp.callbacks.stage_state import Parcel, changes, state_of, state_set_aside, trace

CPU = torch.device("cpu")


class Meter:
    """Holds plain data only."""

    def __init__(self):
        self.total, self.values = 0.0, []


class Service:
    """Holds something else."""

    def __init__(self):
        self.net, self.calls = nn.Linear(1, 1), 0


def edit(value, change):
    """Whether a change of a value is seen."""
    before = {"x": trace(value)}
    change(value)
    return bool(changes(before, {"x": value}))


def raise_total(meter):
    meter.total += 1


def count_call(service):
    service.calls += 1


CHANGES = {
    "list grows": ([1], lambda x: x.append(2)),
    "list within a dict grows": ({"a": [1]}, lambda x: x["a"].append(2)),
    "item moves between lists": ([[1], 2], lambda x: x[0].append(x.pop())),
    "items are replaced by equal ones": ([torch.ones(1)], lambda x: x.__setitem__(0, torch.ones(1))),
    "set grows": ({1}, lambda x: x.add(2)),
    "deque turns": (deque([1, 2], maxlen=2), lambda x: x.append(3)),
    "tensor is edited": (torch.zeros(2), lambda x: x.add_(1)),
    "tensor in a list is edited": ([torch.zeros(2)], lambda x: x[0].add_(1)),
    "array is edited": (np.zeros(2), lambda x: x.__iadd__(1)),
    "number of an object": (Meter(), raise_total),
    "list of an object": (Meter(), lambda x: x.values.append(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_seen(name):
    assert edit(*CHANGES[name])


@pytest.mark.parametrize(
    "value", [1, "a", [1, [2.0]], {"a": {1}}, torch.ones(1), np.ones(1), Meter(), Service(), nn.Linear(1, 1), len]
)
def test_what_did_not_change_is_not_sent(value):
    assert not edit(value, lambda x: None)


def test_objects_that_hold_more_than_plain_data_are_compared_by_identity():
    assert not edit(Service(), count_call)


def test_circle_of_containers_ends():
    circle = []
    circle.append(circle)
    assert not edit(circle, lambda x: None)


def test_edits_of_inference_tensors_are_taken_for_granted():
    with torch.inference_mode():
        value = torch.zeros(1)
    assert edit(value, lambda x: None)


def test_new_and_deleted_attributes_are_changes():
    assert changes({"old": trace(1)}, {"new": 2}) == {"new": 2, "old": Parcel.GONE}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear, self.numbers, self.meter = nn.Linear(1, 1), [1], Meter()
        self.shared = self.numbers


def test_state_is_what_the_author_set_and_no_module():
    assert state_of(Module()).keys() == {"numbers", "meter", "shared"}


def test_parcel_fills_the_same_list_and_deletes():
    module = Module()
    numbers = module.numbers
    sent = Parcel.of({"numbers": [5, torch.ones(1)], "meter": Parcel.GONE, "best": 3})
    sent.unpack_into(module, CPU)
    assert (numbers, module.best) == ([5, torch.ones(1)], 3)
    assert not hasattr(module, "meter")


def test_what_cannot_be_saved_is_named():
    assert Parcel.of({"fine": 1, "function": lambda: 0}).stuck == ("function",)


def test_state_that_is_set_aside_comes_back():
    module = Module()
    numbers, meter = module.numbers, module.meter
    with state_set_aside(module):
        module.numbers.append(2)
        module.meter.total = 9.0
        module.extra = 1
        assert module.shared is module.numbers
    assert module.numbers is numbers
    assert (numbers, meter.total) == ([1], 0.0)
    assert not hasattr(module, "extra")
