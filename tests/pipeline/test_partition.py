import random
from functools import partial
from itertools import combinations, pairwise

import pytest
from torch import nn

from lightning_ptdp.pipeline.partition import balance, module_cost, partition
from tests.models import GPT

SMALL = partial(GPT, num_layers=4, hidden=8, num_heads=2, vocabulary=16)


def dearest(costs, bounds, before, after):
    stages = [sum(costs[low:high]) for low, high in pairwise(bounds)]
    stages[0] += before
    stages[-1] += after
    return max(stages), sum(stage**2 for stage in stages)


@pytest.mark.parametrize("seed", range(30))
def test_balance_is_the_best_of_all_splits(seed):
    draw = random.Random(seed)
    costs = [draw.choice([1.0, 1.0, 2.0, 5.0]) for _ in range(draw.randint(3, 8))]
    num_stages, before, after = draw.randint(1, 3), draw.choice([0.0, 1.5]), draw.choice([0.0, 4.0])
    found = balance(costs, num_stages, before=before, after=after)
    every = [[0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), num_stages - 1)]
    best = min(dearest(costs, bounds, before, after) for bounds in every)
    assert dearest(costs, found, before, after) == pytest.approx(best)
    assert found in every


def test_equal_blocks_are_split_as_evenly_as_can_be():
    assert balance([1.0] * 7, 2) == [0, 3, 7] or balance([1.0] * 7, 2) == [0, 4, 7]
    assert sorted(high - low for low, high in pairwise(balance([1.0] * 10, 4))) == [2, 2, 3, 3]


def test_dear_head_takes_blocks_off_the_last_stage():
    assert balance([1.0] * 8, 2, after=2.0) == [0, 5, 8]


def test_cost_is_matrix_elements_and_a_lookup_is_cheap():
    module = nn.ModuleDict({"linear": nn.Linear(4, 8), "table": nn.Embedding(10, 10), "norm": nn.LayerNorm(4)})
    assert module_cost(module) == 32 + 10
    assert module_cost(module, "table") == 10
    assert module_cost(module, "linear.weight") == 0


def test_gpt_is_placed_as_it_runs():
    cut = partition(SMALL(), 2)
    assert cut.blocks == "blocks"
    assert cut.first == ("token", "position")
    assert cut.last == ("norm", "head")
    assert cut.shared == ()


def test_owners_of_names_are_these():
    cut = partition(SMALL(), 4, split=(1, 1, 1, 1), shared=("position",))
    assert cut.owners("token.weight") == {0}
    assert cut.owners("blocks.2.up.bias") == {2}
    assert cut.owners("head.weight") == {3}
    assert cut.owners("position.weight") == {0, 1, 2, 3}
    assert cut.owners("no_such_buffer") == {0, 1, 2, 3}


def test_stages_of_blocks_follow_the_split():
    cut = partition(SMALL(), 3, split=(2, 1, 1))
    assert (cut.num_stages, cut.num_blocks) == (3, 4)
    assert [cut.stage_of_block(i) for i in range(4)] == [0, 0, 1, 2]


class Named(nn.Module):
    """Modules outside the blocks whose names, kinds and order say where they run."""

    def __init__(self):
        super().__init__()
        self.final_norm = nn.LayerNorm(4)  # registered before the blocks, named as what follows
        self.project_in = nn.Linear(4, 4)
        self.bias = nn.Parameter(nn.LayerNorm(4).weight.detach())
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embeddings = nn.Linear(4, 4)  # after the blocks, named as what goes before
        self.positions = nn.Embedding(4, 4)
        self.lm_head = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)


def test_guess_goes_by_kind_then_name_then_order():
    cut = partition(Named(), 2)
    assert set(cut.first) == {"project_in", "embeddings", "positions"}
    assert set(cut.last) == {"final_norm", "lm_head", "other"}
    assert cut.shared == ("bias",)


def test_plan_of_the_model_goes_before_the_guess():
    module = Named()
    module._pp_plan = {"other": [], "layers": [], "positions": []}
    cut = partition(module, 2)
    assert "other" in cut.first
    assert "positions" in cut.last


def test_names_of_the_user_correct_the_guess():
    cut = partition(Named(), 2, first=("final_norm",), last=("positions",), shared=("other",))
    assert "final_norm" in cut.first
    assert "positions" in cut.last
    assert "other" in cut.shared


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_stages": 5}, "each of the p \\* v = 5 stages needs a block, and 'blocks' has 4; use .* <= 4"),
        ({"num_stages": 2, "split": (1, 2)}, r"pipeline_split=\[1, 2\] must give 2 stages that add up to the 4 blocks"),
        ({"num_stages": 2, "split": (1, 1, 2)}, "it gives 3 stages and 4 blocks"),
        (
            {"num_stages": 2, "shared": ("tabel",)},
            r"shared=\['tabel'\] name no module.*'token', 'position', 'norm', 'h",
        ),
        ({"num_stages": 2, "blocks": "layers"}, "pipeline_blocks='layers' is not an"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_way_out(arguments, words):
    with pytest.raises(ValueError, match=words):
        partition(SMALL(), **arguments)
