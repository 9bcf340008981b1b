from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_ptdp.engine.outputs import detached, extras, merge, packed, unpacked


@dataclass
class Scores:
    values: torch.Tensor
    name: str = "scores"


def test_rows_are_joined():
    assert merge([torch.ones(3, 2), torch.zeros(1, 2)], [3, 1], [3.0, 1.0]).tolist() == [[1, 1]] * 3 + [[0, 0]]


def test_scalars_are_averaged_by_weight():
    assert merge([torch.tensor(1.0), torch.tensor(5.0)], [2, 2], [3.0, 1.0]).item() == 2.0
    assert merge([1.0, 5.0], [2, 2], [3.0, 1.0]) == 2.0


def test_whole_numbers_in_tensors_are_summed():
    assert merge([torch.tensor(3), torch.tensor(4)], [2, 2], [3.0, 1.0]).item() == 7


def test_structures_are_merged_leaf_by_leaf():
    values = [{"rows": torch.ones(2), "names": "same"}, {"rows": torch.zeros(1), "names": "same"}]
    merged = merge(values, [2, 1], [2.0, 1.0])
    assert merged["rows"].tolist() == [1, 1, 0]
    assert merged["names"] == "same"


@pytest.mark.parametrize(
    ("values", "sizes", "expected"),
    [
        (["a", "a"], [2, 1], "a"),
        ([None, None], [2, 1], None),
        ([None, "a"], [2, 1], [None, "a"]),
        ([2, 1], [2, 1], 3),  # rows
        ([2, 2], [2, 2], 4),  # rows
        ([7, 7], [2, 1], 7),  # the number of the batch
        ([7, 5], [2, 1], 12),
        ([True, False], [2, 1], 2 / 3),
    ],
)
def test_plain_values(values, sizes, expected):
    assert merge(values, sizes, [float(size) for size in sizes]) == expected


def test_lists_and_arrays_with_an_entry_a_row_are_joined():
    assert merge([["a", "b"], ["c"]], [2, 1], [2.0, 1.0]) == ["a", "b", "c"]
    assert merge([{"x": [{"n": 1}, {"n": 2}]}, {"x": [{"n": 3}]}], [2, 1], [2.0, 1.0]) == {
        "x": [{"n": 1}, {"n": 2}, {"n": 3}]
    }
    assert merge([np.ones((2, 3)), np.zeros((1, 3))], [2, 1], [2.0, 1.0]).shape == (3, 3)
    assert len(merge([np.ones(5), np.ones(4)], [2, 1], [2.0, 1.0])) == 2


def test_list_of_what_has_rows_is_a_structure():
    merged = merge([[torch.ones(2), torch.zeros(2)], [torch.ones(2), torch.zeros(2)]], [2, 2], [2.0, 2.0])
    assert [tensor.tolist() for tensor in merged] == [[1, 1, 1, 1], [0, 0, 0, 0]]


def test_what_was_on_the_host_stays_there():
    value = {"host": torch.ones(1), "text": "a", "scores": Scores(torch.ones(2))}
    sent = unpacked(packed(value), torch.device("meta"))
    assert (sent["host"].device.type, sent["text"], sent["scores"].values.device.type) == ("cpu", "a", "cpu")


def test_what_cannot_be_merged_stays_a_list():
    assert merge(["a", "b"], [1, 1], [1.0, 1.0]) == ["a", "b"]
    ragged = merge([torch.ones(5), torch.ones(3)], [1, 2], [1.0, 1.0])
    assert [len(value) for value in ragged] == [5, 3]
    assert merge([{"a": 1}, {"b": 1}], [1, 1], [1.0, 1.0]) == [{"a": 1}, {"b": 1}]


def test_single_value_is_itself_without_its_graph():
    value = torch.ones(2, requires_grad=True) * 2
    assert merge([value], [2], [2.0]).grad_fn is None
    assert detached({"x": [value]})["x"][0].grad_fn is None
    assert detached(Scores(value)).values.grad_fn is None


def test_weights_that_are_all_zero_do_not_divide():
    assert merge([torch.tensor(1.0), torch.tensor(5.0)], [2, 2], [0.0, 0.0]).item() == 0.0


def test_extras_are_what_stands_beside_the_loss():
    steps = [{"loss": torch.tensor(1.0), "seen": torch.tensor(2)}, {"loss": torch.tensor(3.0), "seen": torch.tensor(5)}]
    assert {name: value.item() for name, value in extras(steps, [1, 1], [1.0, 1.0]).items()} == {"seen": 7}
    assert extras([torch.tensor(1.0)], [1], [1.0]) == {}
    assert extras([], [], []) == {}
