"""What a plan means for a module, and what is wrong with one."""

import pytest
from torch import nn

from lightning_ptdp.tensor_parallel.heads import check_heads
from lightning_ptdp.tensor_parallel.placement import place, with_sequence
from lightning_ptdp.tensor_parallel.plan import check_plan, find_plan, match, suggestion
from lightning_ptdp.tensor_parallel.shard import Shard
from lightning_ptdp.tensor_parallel.styles import STYLES
from tests.models import GPT
from tests.trainer.test_layouts import PLAN


class Grouped(nn.Module):
    """Attention with fewer key-value heads than query heads, of size 4."""

    def __init__(self, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj = nn.Linear(16, 4 * num_heads), nn.Linear(16, 4 * num_kv_heads)
        self.o_proj = nn.Linear(4 * num_heads, 16)


class Model(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self, layer=Grouped, *, vocabulary=61, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(16, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight


GROUPED = {"layers.*.q_proj": "colwise", "layers.*.k_proj": "colwise", "layers.*.o_proj": "rowwise"}


def faults_of(module, plan, size=2):
    faults = check_plan(module, plan, is_given=True)
    if faults:
        return faults
    placement, faults = place(module, plan, size)
    return faults + check_heads(module, placement, size)


def only_fault(module, plan, size=2):
    faults = faults_of(module, plan, size)
    assert len(faults) == 1, faults
    return faults[0]


def test_star_stands_for_one_part_of_a_name():
    plan = {"layers.*.up": "colwise"}
    assert match(plan, "layers.0.up") == "colwise"
    assert match(plan, "layers.17.up") == "colwise"
    for name in ("layers.up", "layers.0.mlp.up", "layers.0.upper", "x.layers.0.up", "layers.0.up.weight"):
        assert match(plan, name) is None, name


def test_exact_name_counts_before_a_pattern():
    assert match({"layers.*.up": "colwise", "layers.1.up": "replicate"}, "layers.1.up") == "replicate"


def test_dots_of_a_pattern_are_dots():
    assert match({"a.b.*": "colwise"}, "aXb.c") is None


def test_plan_of_a_gpt_cuts_each_weight_where_it_says():
    placement, faults = place(GPT(num_layers=1, vocabulary=61), PLAN, 4)
    assert not faults
    assert {name: (shard.dim, shard.sections) for name, shard in placement.shards.items()} == {
        "token.weight": (0, (61,)),
        "head.weight": (0, (61,)),
        "blocks.0.attention.query.weight": (0, (32,)),
        "blocks.0.attention.query.bias": (0, (32,)),
        "blocks.0.attention.key.weight": (0, (32,)),
        "blocks.0.attention.value.weight": (0, (32,)),
        "blocks.0.attention.value.bias": (0, (32,)),
        "blocks.0.attention.project.weight": (1, (32,)),
        "blocks.0.up.weight": (0, (64,)),
        "blocks.0.up.bias": (0, (64,)),
        "blocks.0.down.weight": (1, (64,)),
    }
    assert placement.heads == {"head"}
    assert [placement.shards["head.weight"].local_length(rank, 4) for rank in range(4)] == [16, 16, 16, 13]


def test_regions_open_where_a_row_parallel_sibling_closes_them():
    placement, _ = place(GPT(num_layers=1), PLAN, 2)
    assert placement.regions == {
        *(f"blocks.0.attention.{name}" for name in ("query", "key", "value")),
        "blocks.0.up",
    }


def test_head_is_a_linear_as_wide_as_the_vocabulary_outside_the_blocks():
    class AsWide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(16, 61)

    placement, _ = place(Model(AsWide), {"layers.*.up": "colwise", "head": "colwise_gather_output"}, 2)
    assert placement.heads == {"head"}


def test_old_names_of_styles_are_known():
    placement, faults = place(Model(), {"head": "colwise_rep", "layers.*.o_proj": "rowwise_rep"}, 2)
    assert not faults
    assert placement.styles["head"] == "colwise_gather_output"
    assert placement.styles["layers.1.o_proj"] == "rowwise_split_input"
    assert not check_plan(Model(), {"head": "colwise_rep"}, is_given=True)


def test_tied_weight_is_cut_alike_under_both_names():
    plan = {"embed": "embedding_rowwise", "head": "colwise"}
    placement, faults = place(Model(tied=True), plan, 4)
    assert not faults
    assert placement.shards == {"embed.weight": Shard(0, (61,)), "head.weight": Shard(0, (61,))}


def test_tied_weight_cut_in_two_ways_is_a_fault():
    text = only_fault(Model(tied=True), {"embed": "embedding_colwise", "head": "colwise"})
    assert "'head.weight' and 'embed.weight' are one tied parameter, and the plan cuts it in two ways" in text
    assert "(embedding_rowwise and colwise)" in text


def test_tied_weight_cut_under_one_name_is_a_fault():
    text = only_fault(Model(tied=True), {"embed": "embedding_rowwise"})
    assert "'head.weight' and 'embed.weight' are one tied parameter, and the plan cuts only the second" in text
    assert "name both (embedding_rowwise and colwise_gather_output)" in text


def test_unknown_style_is_a_fault_that_lists_the_known():
    text = only_fault(Model(), {"head": "columnwise"})
    assert "unknown styles {'head': 'columnwise'}; known are " + ", ".join(STYLES) in text


def test_pattern_that_matches_nothing_is_a_fault_that_lists_names():
    text = only_fault(Model(), {"layers.*.query": "colwise"})
    assert "names ['layers.*.query'], which match no module or parameter" in text
    assert "'layers.*.q_proj'" in text
    assert not check_plan(Model(), {"layers.*.query": "colwise"}, is_given=False)


def test_heads_that_the_peers_do_not_divide():
    faults = [text for text in faults_of(Model(), GROUPED, 3) if "q_proj" in text]
    assert len(faults) == 1, "once for all layers"
    assert "'layers.0.q_proj' has 4 heads, and tensor_parallel_size=3; use one of [1, 2, 4]" in faults[0]
    assert "or leave 'layers.*.q_proj' out of the plan" in faults[0]


def test_key_value_heads_that_the_peers_do_not_divide():
    text = only_fault(Model(), GROUPED, 4)
    assert "their number must be a multiple of tensor_parallel_size" in text
    assert "'layers.0.k_proj' has 2 heads, and tensor_parallel_size=4; use one of [1, 2]" in text


def test_heads_are_known_by_their_number_too():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 4
            self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    text = only_fault(Model(Counted), {"layers.*.qkv": "packed_qkv_colwise", "layers.*.proj": "rowwise"}, 3)
    assert "'layers.0.qkv' has 4 heads, and tensor_parallel_size=3" in text


def test_heads_of_layers_that_are_no_projections_are_not_asked():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 4
            self.up, self.down = nn.Linear(16, 6), nn.Linear(6, 16)

    assert not faults_of(Model(Wide), {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, 3)


def one(module):
    holder = nn.Module()
    holder.m = module
    return holder


@pytest.mark.parametrize(
    ("module", "style", "size", "told"),
    [
        (nn.Linear(4, 5), "colwise", 4, "each of 4 peers a part of 'm.weight', whose dim 0 has 5 elements: too few"),
        (nn.Linear(2, 8), "rowwise", 3, "each of 3 peers a part of 'm.weight', whose dim 1 has 2 elements: too few"),
        (nn.Linear(4, 7), "packed_colwise", 2, "two halves, and 'm.weight' has 7 elements along the packed dim"),
        (nn.Linear(4, 8), "packed_qkv_colwise", 2, "of one size, and 'm.weight' has 8 outputs; use separate proj"),
        (nn.Linear(4, 9), "packed_qkv_colwise", 2, "whole heads of 'm.weight', whose query has 3 outputs"),
        (nn.Linear(4, 8), "embedding_rowwise", 2, "style 'embedding_rowwise' is for nn.Embedding, and 'm' is a Linear"),
        (nn.Sequential(nn.Linear(4, 4)), "colwise", 2, "'m' (Sequential) holds modules of its own; name those instead"),
        (nn.Linear(4, 4), "mla_kv_a_proj", 2, "no module around it has qk_rope_head_dim, or config.qk_rope_head_dim"),
    ],
)
def test_style_that_does_not_fit_is_a_fault(module, style, size, told):
    faults = faults_of(one(module), {"m": style}, size)
    assert any(told in text for text in faults), faults


def test_row_style_on_a_linear_with_its_own_forward_is_a_fault():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    assert "'m' (Scaled) has a forward of its own" in only_fault(one(Scaled(4, 4)), {"m": "rowwise"})


def test_integer_attribute_that_the_peers_do_not_divide():
    holder = one(nn.Linear(4, 4))
    holder.m.split_size = 10
    plan = {"m": "colwise", "m.split_size": "local_size"}
    assert "m.split_size = 10 is to be divided by tensor_parallel_size=4" in only_fault(holder, plan, 4)
    assert place(holder, plan, 2)[0].sizes == ("m.split_size",)


def test_all_faults_are_told():
    faults = place(one(nn.Linear(4, 7)), {"m": "packed_colwise"}, 2)[1]
    faults += place(Model(tied=True), {"embed": "embedding_rowwise"}, 2)[1]
    assert len(faults) == 3, faults  # weight and bias, and the tied one


def test_gradient_of_a_norm_of_heads_is_summed():
    holder = one(nn.LayerNorm(4))
    for plan in ({"m": "replicated_with_grad_allreduce"}, {"m.weight": "replicated_with_grad_allreduce"}):
        summed = place(holder, plan, 2)[0].summed
        assert summed == ({"m.weight", "m.bias"} if "m" in plan else {"m.weight"})


def test_sequence_parallelism_sums_what_blocks_hold_whole():
    module = GPT(num_layers=1)
    plan = PLAN | {"blocks.*.norm_1": "sequence_parallel", "blocks.*.norm_2": "sequence_parallel"}
    placement = with_sequence(module, place(module, plan, 2)[0], "blocks")
    assert placement.sequence_blocks == "blocks"
    assert placement.summed == {
        "blocks.0.norm_1.weight",
        "blocks.0.norm_1.bias",
        "blocks.0.norm_2.weight",
        "blocks.0.norm_2.bias",
        "blocks.0.attention.project.bias",
        "blocks.0.down.bias",
    }


def test_sequence_parallelism_needs_norms_by_name():
    module = GPT(num_layers=1)
    with pytest.raises(ValueError, match="needs the norms before split layers named") as caught:
        with_sequence(module, place(module, PLAN, 2)[0], "blocks")
    assert "none in 'blocks' is; add them, or use sequence_parallel=False" in str(caught.value)


def test_plan_is_found_on_the_module_and_on_its_children():
    model = one(Model())
    model.m.tensor_parallel_plan = {"head": "colwise"}
    model.tensor_parallel_plan = {"m.embed": "embedding_rowwise", "m.head": "replicate"}
    assert find_plan(model) == {"m.embed": "embedding_rowwise", "m.head": "replicate"}
    assert find_plan(Model()) == {}


def test_suggestion_names_each_kind_of_layer_once():
    assert suggestion(Model()) == (
        "{\n"
        '    "embed": "embedding_rowwise",  # 61 x 16\n'
        '    "layers.*.q_proj": "colwise",  # 16 -> 16\n'
        '    "layers.*.k_proj": "colwise",  # 16 -> 8\n'
        '    "layers.*.o_proj": "rowwise",  # 16 -> 16\n'
        '    "head": "colwise",  # 16 -> 61\n'
        "}"
    )
    assert suggestion(nn.ReLU()) == "(the module holds no nn.Linear or nn.Embedding)"
