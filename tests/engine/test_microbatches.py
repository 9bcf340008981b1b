from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from lightning_ptdp.engine.microbatches import Microbatch, num_samples, split

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def rows(n, *shape):
    return torch.arange(n).reshape(n, *[1] * len(shape)).expand(n, *shape).clone()


def parts(batch, size):
    return [microbatch.batch for microbatch in split(batch, size)]


def test_last_microbatch_may_be_smaller():
    cut = split(rows(8, 2), 3)
    assert [(m.index, m.num_samples) for m in cut] == [(0, 3), (1, 3), (2, 2)]
    assert torch.equal(torch.cat([m.batch for m in cut]), rows(8, 2))


def test_batch_that_fits_is_passed_on_whole():
    batch = {"x": rows(2)}
    (only,) = split(batch, 4)
    assert only.batch is batch


def test_empty_batch_gives_no_microbatch():
    assert split({"x": torch.zeros(0, 3)}, 2) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, x],
        lambda x: (x, {"inner": x}),
        lambda x: Pair(x, x),
        lambda x: OrderedDict(x=x, y=x),
        lambda x: Sample(x, "name"),
    ],
    ids=["list", "nested", "namedtuple", "ordered dict", "dataclass"],
)
def test_structure_is_kept(make):
    first, second = parts(make(rows(4, 2)), 2)
    assert type(first) is type(make(rows(4, 2)))
    assert str(first) == str(make(rows(4, 2)[:2]))
    assert str(second) == str(make(rows(4, 2)[2:]))


def test_columns_of_strings_and_numbers_are_cut_like_tensors():
    first, second = parts({"x": rows(4), "name": ["a", "b", "c", "d"], "id": (1, 2, 3, 4)}, 3)
    assert (first["name"], first["id"]) == (["a", "b", "c"], (1, 2, 3))
    assert (second["name"], second["id"]) == (["d"], (4,))


def test_leaves_that_belong_to_every_row_are_passed_on():
    batch = {
        "x": rows(4),
        "note": "as it is",
        "scale": torch.tensor(2.0),
        "mask": torch.ones(1, 5),
        "names": ["a", "b"],
    }
    for part in parts(batch, 2):
        assert part["note"] == "as it is"
        assert part["scale"] is batch["scale"]
        assert part["mask"] is batch["mask"]
        assert part["names"] == ["a", "b"]


def test_tensor_of_another_leading_size_is_refused_by_name():
    batch = {"x": rows(4), "labels": rows(4), "weights": [torch.zeros(3, 2)]}
    with pytest.raises(ValueError, match=r"have 4 rows, but \{\"\['weights'\]\[0\]\": \(3, 2\)\} do not.*=4"):
        split(batch, 2)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"x": torch.zeros(4, 2), "table": torch.zeros(7), "y": torch.zeros(4)}, 4),
        ({"mask": torch.zeros(1, 5), "bias": torch.zeros(1, 5), "x": torch.zeros(3)}, 3),  # sizes of 1 count last
        ({"x": torch.zeros(1, 5)}, 1),
        ({"x": torch.zeros(())}, 1),
        ("no tensor", 1),
    ],
)
def test_number_of_samples_is_the_commonest_leading_size(batch, count):
    assert num_samples(batch) == count


def test_signature_tells_shapes_and_dtypes_apart():
    def signature(batch):
        return split(batch, 9)[0].signature()

    base = signature({"x": torch.zeros(2, 3)})
    assert base == signature({"x": torch.ones(2, 3)})
    assert base != signature({"x": torch.zeros(2, 4)})
    assert base != signature({"x": torch.zeros(2, 3, dtype=torch.long)})
    assert base != signature({"y": torch.zeros(2, 3)})


def test_copy_may_be_changed_in_place():
    batch = {"x": torch.zeros(2, 3), "names": ["a", "b"], "pair": (torch.ones(2), 7)}
    copy = Microbatch(0, batch, 2).copy()
    copy.batch["pair"][0].add_(1)
    copy.batch["names"].append("c")
    copy.batch.pop("x").add_(1)
    assert torch.equal(batch["x"], torch.zeros(2, 3))
    assert batch["names"] == ["a", "b"]
    assert torch.equal(batch["pair"][0], torch.ones(2))
    assert (copy.index, copy.num_samples, copy.batch["pair"][1]) == (0, 2, 7)
