import torch

from lightning_ptdp.outputs import detached, extras, merge


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


def test_what_cannot_be_merged_stays_a_list():
    assert merge(["a", "b"], [1, 1], [1.0, 1.0]) == ["a", "b"]
    ragged = merge([torch.ones(5), torch.ones(3)], [1, 2], [1.0, 1.0])
    assert [len(value) for value in ragged] == [5, 3]
    assert merge([{"a": 1}, {"b": 1}], [1, 1], [1.0, 1.0]) == [{"a": 1}, {"b": 1}]


def test_single_value_is_itself_without_its_graph():
    value = torch.ones(2, requires_grad=True) * 2
    assert merge([value], [2], [2.0]).grad_fn is None
    assert detached({"x": [value]})["x"][0].grad_fn is None


def test_weights_that_are_all_zero_do_not_divide():
    assert merge([torch.tensor(1.0), torch.tensor(5.0)], [2, 2], [0.0, 0.0]).item() == 0.0


def test_extras_are_what_stands_beside_the_loss():
    steps = [{"loss": torch.tensor(1.0), "seen": torch.tensor(2)}, {"loss": torch.tensor(3.0), "seen": torch.tensor(5)}]
    assert {name: value.item() for name, value in extras(steps, [1, 1], [1.0, 1.0]).items()} == {"seen": 7}
    assert extras([torch.tensor(1.0)], [1], [1.0]) == {}
    assert extras([], [], []) == {}
