"""Ranks that differ are told so, with both values; what one rank finds wrong, all raise."""

import pytest
import torch.distributed as dist

from lightning_ptdp.preflight.compare import Section, compare, differing_items, gather_differing, in_words
from tests.spmd import run_spmd, spmd


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 2, 5, 6, 7], "ranks 0, 2 and 5-7"),
    ],
)
def test_ranks_are_told_in_runs(ranks, text):
    assert in_words(ranks) == text


def section(name, items, **explained):
    return Section(name, f"all ranks must have the same {name}", items, "mend it", **explained)


def compared(items, faults, explained_by=()):
    """items, faults: of each rank."""
    rank = dist.get_rank()
    consequence = section("plan", {"style": str(items[rank])}, explained_by=frozenset(explained_by))
    found = compare([section("versions", items[rank]), consequence], faults[rank], dist.group.WORLD)
    return found.faults, found.are_alike


def test_ranks_that_agree_find_nothing():
    assert run_spmd(compared, items=[{"torch": "2.13"}] * 2, faults=[[], []]) == [([], True)] * 2


def test_difference_is_told_with_both_values_and_the_ranks():
    items = [{"torch": "2.13.0"}] * 2 + [{"torch": "2.12.0"}, {"torch": "2.11.0"}]
    told = run_spmd(compared, world_size=4, items=items, faults=[[]] * 4, explained_by=["versions"])
    text = (
        "all ranks must have the same versions: rank 2 has torch 2.12.0 and rank 3 has torch 2.11.0 where ranks 0 and "
        "1 have 2.13.0; mend it"
    )
    assert told == [([text], False)] * 4


def test_what_a_rank_lacks_is_told():
    told = run_spmd(compared, items=[{"a": "1"}, {"b": "2"}], faults=[[], []], explained_by=["versions"])
    assert told[0] == told[1]
    assert "rank 1 has no a where rank 0 has 1, rank 1 has b 2 where rank 0 has none; mend it" in told[0][0][0]


def test_many_differences_are_counted():
    items = [{str(i): "x" for i in range(9)}, {str(i): "y" for i in range(9)}]
    (faults, _), _ = run_spmd(compared, items=items, faults=[[], []], explained_by=["versions"])
    assert "and 5 more differ" in faults[0]


def test_another_order_is_a_difference():
    items = [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]
    (faults, _), _ = run_spmd(compared, items=items, faults=[[], []], explained_by=["versions"])
    assert "the order differs between ranks" in faults[0]


def test_consequences_are_told_only_without_their_cause():
    items = [{"torch": "1"}, {"torch": "2"}]
    (explained, _), _ = run_spmd(compared, items=items, faults=[[], []], explained_by=["versions"])
    (apart, _), _ = run_spmd(compared, items=items, faults=[[], []])
    assert (len(explained), len(apart)) == (1, 2)


def test_all_ranks_tell_what_any_found_wrong():
    faults = [["both", "mine"], ["both"], ["both", "of two"], ["both", "of two"]]
    told = run_spmd(compared, world_size=4, items=[{}] * 4, faults=faults)
    assert told == [(["both", "on rank 0: mine", "on ranks 2 and 3: of two"], False)] * 4


@spmd(world_size=4)
def test_only_sections_that_differ_are_sent():
    rank = dist.get_rank()
    stated = {"same": {"a": "1"}, "differs": {"b": str(rank // 2)}}
    found = gather_differing(stated, dist.group.WORLD)
    assert found == {"differs": [{"b": "0"}, {"b": "0"}, {"b": "1"}, {"b": "1"}]}
    assert differing_items(found["differs"]) == {"b": ["0", "0", "1", "1"]}
