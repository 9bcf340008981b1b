"""The loss is a mean over the tokens of the whole global batch, however it is cut (PO-03)."""

from functools import partial

import pytest
import torch

from tests.models import TokenCosts, token_costs
from tests.oracle import parallel
from tests.spmd import SpmdError

# Real tokens and the cost of each; 29 / 16 over all tokens, 2.75 as a mean over rows, 1.95 as one over pairs of rows.
ROWS = ((8, 1.0), (2, 3.0), (5, 2.0), (1, 5.0))
EVERY_CUT = [
    (1, 1, 1),
    (1, 1, 3),
    (1, 1, 4),
    (1, 2, 1),
    (1, 2, 2),
    (2, 1, 1),
    (2, 1, 3),
    (2, 1, 4),
    (2, 2, 1),
    (2, 2, 2),
]
SOME_CUTS = [(1, 2, 2), (2, 1, 1), (2, 2, 1)]
CUTS = [("cross_entropy", *cut) for cut in EVERY_CUT] + [("weight", *cut) for cut in SOME_CUTS]


def losses_and_gradients(kind, rows, p, d, b):
    run, _ = parallel(
        partial(TokenCosts, kind=kind),
        [token_costs(*rows)],
        pipeline_parallel_size=p,
        data_parallel_size=d,
        micro_batch_size=b,
    )
    return run.losses, {name: gradient.item() for name, gradient in run.gradients[0].items()}


@pytest.mark.parametrize(("kind", "p", "d", "b"), CUTS)
def test_every_token_counts_the_same(kind, p, d, b):
    losses, gradients = losses_and_gradients(kind, ROWS, p, d, b)
    assert losses == pytest.approx([1.8125], abs=1e-15)
    assert gradients == pytest.approx({"blocks.0.w": 1.8125, "blocks.1.w": 1.8125}, abs=1e-15)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", ["cross_entropy", "weight"])
@pytest.mark.parametrize(
    ("rows", "mean"),
    [
        (((0, 9.0), (8, 1.0), (6, 2.0), (2, 2.0)), 1.5),
        (((6, 2.0), (2, 3.0), (0, 9.0), (0, 9.0)), 2.25),
    ],
    ids=["microbatch", "replica"],
)
def test_what_has_no_token_counts_nothing(kind, rows, mean, p, d):
    losses, gradients = losses_and_gradients(kind, rows, p, d, 1)
    assert losses == pytest.approx([mean], abs=1e-15)
    assert gradients == pytest.approx({"blocks.0.w": mean, "blocks.1.w": mean}, abs=1e-15)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1)])
def test_batch_without_any_token_changes_nothing(p, d):
    run, _ = parallel(
        TokenCosts,
        [token_costs((0, 9.0), (0, 9.0))],
        pipeline_parallel_size=p,
        data_parallel_size=d,
        micro_batch_size=1,
    )
    assert run.losses == [0.0]
    assert all(torch.equal(run.weights[0][name], value) for name, value in run.initial.items())


@pytest.mark.parametrize("p", [1, 2])
def test_mean_that_hides_its_weight_asks_for_it(p):
    with pytest.raises(SpmdError, match=r'return the number of terms that the loss is a mean of: \{"loss": loss, "wei'):
        losses_and_gradients("by_hand", ROWS, p, 2 // p, 1)
