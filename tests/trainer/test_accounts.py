"""What a run keeps and sends, held to the formulas of the paper and of arXiv 2205.05198."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.accounts import Accounts, Model, Sizes, activation_bytes, pipeline_elements, tensor_elements
from benchmarks.memory import peak_bytes
from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.oracle import quiet_trainer
from tests.spmd import run_spmd

SIZES = Sizes()
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def run(world_size, runs=((SIZES, "32-true"),), **strategy):
    """For each run, of (sizes, precision), the accounts of all ranks; microbatches have one row."""
    by_rank = run_spmd(count, world_size=world_size, timeout=60, runs=runs, strategy=strategy)
    return [list(accounts) for accounts in zip(*by_rank, strict=True)]


def count(runs, strategy):
    return [accounts_of(sizes, precision, strategy) for sizes, precision in runs]


def accounts_of(sizes, precision, strategy):
    seed_everything()
    accounts = Accounts()
    chosen = PTDPStrategy(micro_batch_size=1, **strategy)
    quiet_trainer(chosen, precision=precision, callbacks=[accounts], use_distributed_sampler=False).fit(Model(sizes))
    return accounts.account


@pytest.mark.parametrize(("t", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_a_layer_keeps_no_more_than_the_formula(t, sequence_parallel):
    """Attention keeps scores only where it drops some of them out on a CPU."""
    cases = list(itertools.product((0.0, 0.1), ("bf16-true", "bf16-mixed")))
    runs = [(replace(SIZES, layers=2, batch=1, dropout=dropout), precision) for dropout, precision in cases]
    for (dropout, precision), found in zip(
        cases, run(t, runs, tensor_parallel_size=t, sequence_parallel=sequence_parallel), strict=True
    ):
        bound = activation_bytes(SIZES, 1, t=t, sequence_parallel=sequence_parallel, scores=dropout > 0)
        for account in found:
            assert 0.9 * bound <= account.activations <= bound, (dropout, precision)
            assert (account.weights >= 24 * SIZES.hidden**2 / t) == (precision == "bf16-mixed")


def of_a_layer(**strategy):
    """What each of two tensor peers sends for a layer in a batch, by kind: the difference of two depths, since
    embeddings and the head send too."""
    few, many = run(2, [(replace(SIZES, layers=n), "32-true") for n in (2, 3)], tensor_parallel_size=2, **strategy)
    return [
        [more.elements("tensor", kind) - less.elements("tensor", kind) for kind in KINDS]
        for less, more in zip(few, many, strict=True)
    ]


@pytest.mark.parametrize(
    ("strategy", "forwards"), [({}, 1), ({"recompute": "full"}, 2)], ids=["nothing recomputed", "all recomputed"]
)
def test_tensor_peers_send_what_the_formula_says(strategy, forwards):
    assert of_a_layer(**strategy) == [[SIZES.batch * tensor_elements(SIZES, 1, 2, forwards=forwards), 0, 0]] * 2


def test_sequence_parallel_peers_gather_each_split_input_again():
    """Four gathers and four reduce-scatters are as much as four all-reduces; two more gathers keep inputs in parts."""
    unit = SIZES.batch * tensor_elements(SIZES, 1, 2) / 8
    whole_weights = 6 * SIZES.hidden  # of norms and row-parallel biases, whose gradients are summed once a batch
    assert of_a_layer(sequence_parallel=True) == [[whole_weights, 6 * unit, 4 * unit]] * 2


@pytest.mark.parametrize(("scatter_gather", "parts"), [(True, 2), (False, 1)])
def test_stages_send_what_the_formula_says(scatter_gather, parts):
    (found,) = run(4, tensor_parallel_size=2, pipeline_parallel_size=2, scatter_gather=scatter_gather)
    sent = [account.elements("pipeline", "send") for account in found]
    assert sent == [SIZES.batch * pipeline_elements(SIZES, 1, parts=parts)] * 4


@pytest.mark.parametrize("shards", [False, True])
def test_replicas_send_what_the_formula_says(shards):
    """A ring all-reduce of the gradients, or a reduce-scatter of them and an all-gather of the weights; and a flag for
    each parameter."""
    (found,) = run(2, distributed_optimizer=shards)
    elements, tensors = found[0].parameters
    assert elements > 0
    expected = [tensors, elements / 2, elements / 2] if shards else [elements + tensors, 0, 0]
    assert [[account.elements("data", kind) for kind in KINDS] for account in found] == [expected] * 2


@pytest.mark.slow
def test_peak_memory_of_a_pipeline_of_four_is_below_two_fifths():
    """In processes of their own: nothing is subtracted for what a process holds without any model."""
    whole, part = (peak_bytes(p) for p in (1, 4))
    assert part < 0.4 * whole
    assert part > 0.25 * whole
