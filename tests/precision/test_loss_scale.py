"""The loss scale backs off, grows and waits as Apex and Megatron-LM say."""

import pytest

from lightning_ptdp.precision.loss_scale import LossScale


def values(scale, steps):
    """The scale after each step; o is a good one, x a bad one."""
    seen = []
    for step in steps:
        scale.update(is_finite=step == "o")
        seen.append(scale.value)
    return seen


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({}, "x", [4.0]),
        ({"growth_interval": 2}, "ooo", [8.0, 16.0, 16.0]),
        ({"growth_interval": 2}, "oxoo", [8.0, 4.0, 4.0, 8.0]),
        ({"hysteresis": 2}, "xxx", [8.0, 4.0, 2.0]),
        ({"hysteresis": 2, "growth_interval": 1}, "xoxx", [8.0, 16.0, 16.0, 8.0]),
        ({"minimum": 4.0}, "xxx", [4.0, 4.0, 4.0]),
        ({"growth_factor": 4.0, "growth_interval": 1, "backoff_factor": 0.25}, "ox", [32.0, 8.0]),
    ],
)
def test_scale_after_each_step(options, steps, expected):
    assert values(LossScale(8.0, **options), steps) == expected


def test_state_goes_on_where_it_stood():
    scale = LossScale(8.0, growth_interval=3, hysteresis=2)
    values(scale, "xoo")
    again = LossScale(1024.0, growth_interval=3, hysteresis=2)
    again.load_state_dict(scale.state_dict())
    assert values(again, "oxx") == values(scale, "oxx")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"value": 0.5}, "initial_scale >= minimum"),
        ({"growth_factor": 0.5}, "growth_factor >= 1"),
        ({"growth_interval": 0}, "growth_interval >= 1"),
        ({"backoff_factor": 1.0}, "0 < backoff_factor < 1"),
        ({"hysteresis": 0}, "hysteresis >= 1"),
    ],
)
def test_senseless_numbers_are_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        LossScale(**options)
