"""A region is a tensor's place in a storage, and operations tell what they edit."""

import torch

from lightning_ptdp.regions import Region, edited

aten = torch.ops.aten


def test_a_region_is_the_same_view_of_another_storage():
    first, second = torch.arange(12.0), torch.arange(12.0) + 100
    view = first.view(3, 4)[1:, ::2]
    assert torch.equal(Region.of(view, "first").on(second.untyped_storage()), second.view(3, 4)[1:, ::2])


def test_regions_are_equal_where_all_is():
    tensor = torch.zeros(4)
    assert Region.of(tensor, 1) == Region.of(tensor, 1)
    assert len({Region.of(tensor, 1), Region.of(tensor, 2), Region.of(tensor[1:], 1)}) == 3


def test_edited_arguments_are_found_by_position_by_name_and_in_lists():
    a, b, out = torch.zeros(2), torch.ones(2), torch.empty(2)
    assert edited(aten.add.Tensor, (a, b), {}) == []
    assert [id(t) for t in edited(aten.add_.Tensor, (a, b), {})] == [id(a)]
    assert [id(t) for t in edited(aten.add.out, (a, b), {"out": out})] == [id(out)]
    assert [id(t) for t in edited(aten._foreach_add_.Scalar, ([a, b], 1), {})] == [id(a), id(b)]
