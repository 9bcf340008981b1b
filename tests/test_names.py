"""Dotted names: patterns, stars, joints, and short lists for messages."""

from __future__ import annotations

import pytest

from lightning_ptdp.names import first_few, join, matches, starred


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.up", "layers.3.up", True),
        ("layers.*.up", "layers.last.up", True),
        ("layers.*.up", "layers.3.mlp.up", False),
        ("layers.*.up", "layers.3.up.weight", False),
        ("layers.3.up", "layersx3.up", False),
        ("layers.*.up", "layers.3._orig_mod.up", True),
        ("*", "", False),
    ],
)
def test_a_star_stands_for_one_part(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("layers.3.up", "layers.*.up"),
        ("experts.0.1", "experts.*.*"),
        ("0.weight", "0.weight"),
        ("layer3.fc2", "layer3.fc2"),
    ],
)
def test_numbers_below_the_root_become_stars(name: str, pattern: str) -> None:
    assert starred(name) == pattern


def test_a_child_of_the_root_has_its_own_name() -> None:
    assert join("", "up") == "up"
    assert join("layers.3", "up") == "layers.3.up"


def test_a_short_list_says_how_many_it_leaves_out() -> None:
    assert first_few("abc", 3) == "a, b, c"
    assert first_few("abcd", 2) == "a, b and 2 more"
    assert first_few([], 2) == ""
