"""Models of the transformers library train unmodified under tensor and pipeline parallelism."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp.pipeline.blocks import find_blocks
from lightning_ptdp.recompute import choose, install
from lightning_ptdp.tensor_parallel.heads import check_heads
from lightning_ptdp.tensor_parallel.placement import place
from lightning_ptdp.tensor_parallel.plan import find_plan
from tests.live import LiveStorages
from tests.models import llama_config, texts
from tests.oracle import assert_same, parallel, serial
from tests.spmd import run_spmd
from tests.trainer.test_recomputation import FULL, OFF, SELECTIVE, assert_same_bits, fits_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow


def gpt2():
    """Packed query, key and value in a transposed linear; tied head; learned positions."""
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    """Grouped-query attention, gate and up apart, rotary positions."""
    return transformers.LlamaForCausalLM(llama_config())


def deepseek():
    """Compressed keys whose rotary part goes past the split projection; its linears are not told its config."""
    config = transformers.DeepseekV2Config(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        max_position_embeddings=16,
    )
    return transformers.DeepseekV2ForCausalLM(config)


class LanguageModel(pl.LightningModule):
    """Trains what it is given as its documentation shows; by the model's own loss, or one of the user's."""

    def __init__(self, make, has_own_loss):
        super().__init__()
        self.model, self.has_own_loss = make(), has_own_loss

    def training_step(self, batch, batch_idx):
        if self.has_own_loss:
            return self.model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss
        logits = self.model(input_ids=batch["ids"], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "has_own_loss", "tolerance"),
    [(gpt2, False, 1e-10), (llama, False, 1e-6), (gpt2, True, 1e-6), (llama, True, 1e-6), (deepseek, True, 1e-6)],
)
def test_model_gives_the_numbers_of_one_process(make, has_own_loss, tolerance):
    """tolerance: of float32 where the model's own loss, or its norms, compute in that whatever the weights are."""
    module = partial(LanguageModel, make, has_own_loss)
    batches = [texts(4, length=8, vocabulary=61, seed=i) for i in range(2)]
    run, _ = parallel(
        module, batches, tensor_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=2, timeout=180.0
    )
    assert_same(run, serial(module, batches), tolerance=tolerance)


class EagerModel(LanguageModel):
    """With attention written out, and dropout."""

    def __init__(self, make):
        super().__init__(make, has_own_loss=False)
        self.model.set_attn_implementation("eager")
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1


def test_recomputed_model_has_the_bits_of_one_that_is_not():
    ranks = run_spmd(
        fits_of,
        world_size=4,
        timeout=180.0,
        modes=[OFF, SELECTIVE, FULL],
        make=partial(EagerModel, gpt2),
        batches=[texts(4, length=8, vocabulary=61, seed=i) for i in range(2)],
        strategy={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "micro_batch_size": 2},
        trainer={},
    )
    for fits in ranks:
        assert_same_bits(fits)


@pytest.mark.parametrize("make", [gpt2, llama, deepseek])
def test_scores_of_eager_attention_are_computed_again(make):
    batch, largest, gradients = texts(2, length=16, vocabulary=61), [], []
    for selective in (False, True):
        torch.manual_seed(0)
        module = EagerModel(make)
        path = find_blocks(module)
        names = [f"{path}.{name}" for name, _ in module.get_submodule(path).named_children()]
        if selective:
            install(module, choose(module, [names], kind="selective"), [0], torch.device("cpu"), [])
        with LiveStorages() as live:
            logits = module.model(input_ids=batch["ids"], use_cache=False).logits
        largest.append(live.largest(shape=(16, 16)))
        logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert all(map(torch.equal, *gradients))
    assert largest[0] >= 2 * 4 * 16 * 16 > largest[1]


def test_gpt2_has_a_plan_of_ours():
    module = nn.Module()
    module.model = gpt2()
    assert find_plan(module) == {
        "model.transformer.wte": "embedding_rowwise",
        "model.transformer.h.*.attn.c_attn": "packed_qkv_colwise",
        "model.transformer.h.*.attn.split_size": "local_size",
        "model.transformer.h.*.attn.c_proj": "rowwise",
        "model.transformer.h.*.mlp.c_fc": "colwise",
        "model.transformer.h.*.mlp.c_proj": "rowwise",
        "model.lm_head": "colwise_gather_output",
    }
    placement, faults = place(module, find_plan(module), 4)
    assert not faults
    assert placement.heads == {"model.lm_head"}
    assert placement.shards["model.transformer.h.0.attn.c_attn.weight"].sections == (16, 16, 16)
    assert placement.shards["model.transformer.h.0.attn.c_attn.weight"].dim == 1
    assert placement.sizes == ("model.transformer.h.0.attn.split_size", "model.transformer.h.1.attn.split_size")


def test_plan_of_llama_is_its_own_and_its_embedding_by_vocabulary():
    module = llama()
    plan = find_plan(module)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    placement, faults = place(module, plan, 2)
    assert not faults
    assert placement.styles["model.embed_tokens"] == "embedding_rowwise"
    assert placement.heads == {"lm_head"}


def test_key_value_heads_of_llama_bound_the_peers():
    placement, _ = place(llama(), find_plan(llama()), 4)
    (text, *_) = check_heads(llama(), placement, 4)
    assert "'model.layers.0.self_attn.k_proj' has 2 heads, and tensor_parallel_size=4; use one of [1, 2]" in text
