"""What a report says, and how."""

import math

import pytest

from lightning_ptdp.check import ParameterReport, Report
from lightning_ptdp.check.report import patterns


def parameter(name, relative, reason=""):
    return ParameterReport(
        name=name,
        stages=(0, 1),
        style="colwise",
        difference=relative / 2,
        size=0.5,
        relative=relative,
        is_same=relative <= 1e-6,
        reason=reason,
    )


def report(*parameters, **changes):
    usual = {"num_rows": 8, "num_microbatches": 4, "dtype": "float64", "tolerance": 1e-6}
    losses = {"loss_whole": 2.0, "loss_split": 2.0}
    return Report("Net", "tensor 2 x pipeline 1 x data 1", parameters=parameters, **(usual | losses | changes))


def test_difference_is_a_row_with_its_reason_and_the_rest_a_number():
    shown = str(report(parameter("a.weight", 0.5, "why"), parameter("b", 1e-15), parameter("c", 0.0), reasons=("why",)))
    assert shown.splitlines() == [
        "check of Net: tensor 2 x pipeline 1 x data 1",
        "one batch of 8 rows, 4 microbatches a replica, in float64; the same means within 1e-06, relative",
        "",
        "loss: 2 whole, 2 split, difference 0.0e+00",
        "gradients: 2 of 3 parameters the same; of these the largest difference is 1.0e-15, relative, of b",
        "",
        "differs   stage  style    difference  relative  why",
        "a.weight  0,1    colwise  2.5e-01     5.0e-01   [1]",
        "",
        "why it may be:",
        "[1] why",
        "",
        "This layout does NOT compute what one process computes.",
    ]


def test_table_has_an_end():
    shown = str(report(*(parameter(f"p{i}", 1.0) for i in range(30))))
    assert "\nand 10 more\n" in shown
    assert "p19 " in shown
    assert "p20 " not in shown


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"loss_split": 2.0 + 1e-6}, True),
        ({"loss_split": 2.0 + 1e-5}, False),
        ({"loss_split": math.nan}, False),
        ({"error": "KeyError: mine"}, False),
        ({"faults": ("too many",)}, False),
    ],
)
def test_ok_needs_all(changes, ok):
    found = report(parameter("a", 0.0), **changes)
    assert found.ok is ok
    if ok:
        found.raise_if_different()
    else:
        with pytest.raises(RuntimeError, match="check of Net: tensor 2 x pipeline 1 x data 1"):
            found.raise_if_different()


def test_not_a_number_differs():
    assert not report(parameter("a", math.nan)).ok


def test_names_that_differ_in_a_number_are_one():
    names = [*(f"layers.{i}.norm" for i in range(4)), "head.0"]
    assert patterns(names) == "'layers.*.norm', 'head.0'"
    assert patterns(names[:2]) == "'layers.0.norm', 'layers.1.norm'"
