"""The GPT recipe's network: sizes, start, causality, and what a tensor-parallel plan may rely on."""

import math
from fnmatch import fnmatch

import pytest
import torch
from lightning_ptdp.recipes.gpt import GPT, generate
from lightning_ptdp.recipes.gpt.model import Attention, num_parameters
from torch import nn

SIZES = {"vocab_size": 61, "max_seq_len": 16, "num_layers": 3, "hidden_size": 32, "num_heads": 4}


@pytest.fixture
def gpt() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(**SIZES).eval()


IDS = torch.tensor([[5, 9, 2, 60, 0], [1, 1, 2, 3, 5]])


def test_logits_are_one_row_a_token(gpt):
    assert gpt(IDS).shape == (2, 5, 61)


def test_logits_do_not_see_later_tokens(gpt):
    other = IDS.clone()
    other[:, 3:] = 7
    torch.testing.assert_close(gpt(IDS)[:, :3], gpt(other)[:, :3])


def test_the_formula_counts_the_parameters(gpt):
    sizes = {name: size for name, size in SIZES.items() if name != "num_heads"}
    assert sum(parameter.numel() for parameter in gpt.parameters()) == num_parameters(**sizes)


def test_the_paper_s_smallest_model_has_1_7_billion_parameters():
    assert num_parameters(vocab_size=51200, max_seq_len=2048, num_layers=24, hidden_size=2304) == 1_652_230_656


def test_tied_embeddings_are_one_parameter(gpt):
    assert gpt.head.weight is gpt.tok.weight
    untied = GPT(**SIZES, tie_embeddings=False)
    assert untied.head.weight is not untied.tok.weight


@pytest.mark.parametrize(
    ("name", "std"),
    [("tok", 0.02), ("blocks.1.attn.q", 0.02), ("blocks.0.mlp.up", 0.02)]
    + [(name, 0.02 / math.sqrt(2 * 3)) for name in ("blocks.2.attn.proj", "blocks.0.mlp.down")],
)
def test_weights_start_as_gpt2_s(gpt, name, std):
    weight = gpt.get_submodule(name).weight
    assert weight.std().item() == pytest.approx(std, rel=0.1)  # four deviations of 1024 draws
    assert weight.mean().item() == pytest.approx(0.0, abs=0.15 * std)


def test_biases_start_at_zero_and_norms_at_one(gpt):
    assert all(
        (part.bias == 0).all() for part in gpt.modules() if isinstance(part, nn.Linear) and part.bias is not None
    )
    assert all((part.weight == 1).all() for part in gpt.modules() if isinstance(part, nn.LayerNorm))


def test_each_line_of_the_plan_names_a_module(gpt):
    names = [name for name, _ in gpt.named_modules()]
    assert [pattern for pattern in gpt.tensor_parallel_plan if not any(fnmatch(name, pattern) for name in names)] == []


def test_the_plan_names_each_module_with_weights_but_positions(gpt):
    named = [name for name, part in gpt.named_modules() if isinstance(part, nn.Linear | nn.Embedding | nn.LayerNorm)]
    unnamed = [name for name in named if not any(fnmatch(name, pattern) for pattern in gpt.tensor_parallel_plan)]
    assert unnamed == ["pos"]


def narrowed(attention: Attention, rows: slice) -> Attention:
    """The same attention with some of its heads only."""
    part = Attention(32, num_heads=4, dropout=0.0)
    for name in ("q", "k", "v"):
        linear: nn.Linear = getattr(attention, name)
        cut: nn.Linear = getattr(part, name)
        cut.weight, cut.bias = nn.Parameter(linear.weight[rows]), nn.Parameter(linear.bias[rows])
    part.proj.weight = nn.Parameter(attention.proj.weight[:, rows])
    part.proj.bias = nn.Parameter(attention.proj.bias / 2)
    return part


def test_attention_with_half_of_the_heads_is_its_share_of_the_sum(gpt):
    attention = gpt.blocks[0].attn
    x = torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32)
    halves = [narrowed(attention, rows)(x) for rows in (slice(0, 16), slice(16, 32))]
    torch.testing.assert_close(halves[0] + halves[1], attention(x))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="got hidden_size=32, num_heads=5"):
        GPT(**{**SIZES, "num_heads": 5})


def test_a_sequence_beyond_the_positions_is_refused(gpt):
    with pytest.raises(ValueError, match=r"at most max_seq_len=16 tokens.*got 17"):
        gpt(torch.zeros(1, 17, dtype=torch.int64))


def test_dropout_acts_in_training_only():
    gpt = GPT(**SIZES, dropout=0.5)
    with torch.random.fork_rng():
        assert not torch.equal(gpt.train()(IDS), gpt(IDS))
    assert torch.equal(gpt.eval()(IDS), gpt(IDS))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_generation_continues_the_prompt(gpt):
    drawn = generate(gpt, IDS, max_new_tokens=4, generator=seeded(0))
    assert drawn.shape == (2, 9)
    assert torch.equal(drawn[:, :5], IDS)


def test_generation_follows_from_the_seed(gpt):
    runs = [generate(gpt, IDS, max_new_tokens=8, generator=seeded(seed)).tolist() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_temperature_zero_and_one_candidate_take_the_likeliest(gpt):
    likeliest = gpt(IDS)[:, -1].argmax(dim=-1)
    for options in ({"temperature": 0.0}, {"top_k": 1}):
        assert torch.equal(generate(gpt, IDS, max_new_tokens=1, **options)[:, -1], likeliest)


def test_top_k_draws_from_k_tokens(gpt):
    allowed = set(gpt(IDS[:1])[0, -1].topk(3).indices.tolist())
    drawn = {
        generate(gpt, IDS[:1], max_new_tokens=1, top_k=3, generator=seeded(seed))[0, -1].item() for seed in range(40)
    }
    assert drawn == allowed


def test_generation_goes_on_beyond_the_context(gpt):
    drawn = generate(gpt, IDS, max_new_tokens=20, temperature=0.0)
    assert drawn.shape == (2, 25)
    assert torch.equal(drawn[:, -1], gpt(drawn[:, -17:-1])[:, -1].argmax(dim=-1))


def test_generation_leaves_the_mode_as_it_was(gpt):
    generate(gpt.train(), IDS, max_new_tokens=1, temperature=0.0)
    assert gpt.training


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}, {"max_new_tokens": -1}])
def test_generation_refuses_what_is_out_of_range(gpt, options):
    with pytest.raises(ValueError, match="temperature and max_new_tokens are at least 0 and top_k at least 1"):
        generate(gpt, IDS, **{"max_new_tokens": 1, **options})
