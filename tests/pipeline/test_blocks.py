import pytest
from torch import nn

from lightning_ptdp.pipeline.blocks import find_blocks


def test_list_with_most_parameters_is_taken():
    module = nn.Module()
    module.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    module.model = nn.Module()
    module.model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    assert find_blocks(module) == "model.layers"


def test_lists_inside_blocks_are_not_taken():
    module = nn.Module()
    module.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3))
    assert find_blocks(module) == "layers"


def test_sequential_counts_only_where_no_list_is():
    module = nn.Module()
    module.head = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    assert find_blocks(module) == "head"
    module.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert find_blocks(module) == "layers"


def test_named_list_is_taken():
    module = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(9, 9)]), "b": nn.ModuleList([nn.Linear(2, 2)])})
    assert find_blocks(module, "b") == "b"


@pytest.mark.parametrize("name", ["c", "a.0", "a.weight"])
def test_unknown_name_is_refused_with_those_that_exist(name):
    module = nn.Module()
    module.a, module.b = nn.ModuleList([nn.Linear(9, 9)]), nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=rf"pipeline_blocks='{name}' is not an .* it has 'a', 'b'"):
        find_blocks(module, name)


@pytest.mark.parametrize(
    "module",
    [
        nn.ModuleDict({"only": nn.Linear(2, 2)}),
        nn.ModuleDict({"only": nn.ModuleList([nn.Linear(2, 2)])}),
        nn.ModuleDict({"only": nn.ModuleList([nn.ReLU(), nn.ReLU()])}),
    ],
    ids=["no list", "one block", "no parameters"],
)
def test_module_without_a_list_of_blocks_is_told_what_to_do(module):
    with pytest.raises(ValueError, match=r"it holds only \(.*use pipeline_parallel_size=1, or put the layers into"):
        find_blocks(module)
