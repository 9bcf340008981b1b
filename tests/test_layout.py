"""How a module lies on the ranks, and what is said where it cannot."""

import torch

from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.layout import choose_model_parallel, lay_out, layout_of, memory_of, remember
from lightning_ptdp.topology import Topology
from tests.models import GPT, PairNet
from tests.trainer.test_layouts import PLAN


def topology(t=1, p=1, d=1):
    return Topology(tensor_parallel_size=t, pipeline_parallel_size=p, data_parallel_size=d)


def faults_of(module, *, t=1, p=1, plan=None, **config):
    config = ParallelConfig(tensor_parallel_size=t, pipeline_parallel_size=p, tensor_parallel_plan=plan, **config)
    return lay_out(module, config, topology(t, p))[1]


def test_one_rank_has_neither_stages_nor_shards():
    layout, faults = lay_out(GPT(), ParallelConfig(), topology())
    assert not faults
    assert layout.partition.num_stages == 1
    assert not layout.placement.shards


def test_faults_of_stages_and_heads_are_told_together():
    faults = faults_of(GPT(hidden=12), t=3, p=5, plan=PLAN)
    assert len(faults) == 1 + 3, faults  # projections in the order of the module
    assert "p * v = 5 stages needs a block, and 'blocks' has 4" in faults[0]
    for name, text in zip(("query", "value", "key"), faults[1:], strict=True):
        assert f"'blocks.0.attention.{name}' has 4 heads, and tensor_parallel_size=3" in text


def test_faults_of_a_plan_come_before_what_it_means():
    faults = faults_of(GPT(), t=2, plan={"token": "by_rows", "layers.*.up": "colwise"})
    assert len(faults) == 2
    assert "unknown styles {'token': 'by_rows'}" in faults[0]
    assert "names ['layers.*.up'], which match no module or parameter" in faults[1]


def test_module_without_a_plan_is_shown_a_draft():
    (text,) = faults_of(PairNet(), t=2)
    assert "tensor_parallel_size=2 needs a plan" in text
    assert "the module (PairNet, Linear, ModuleList) carries none" in text
    assert '"blocks.*.linear": "colwise",  # 8 -> 8' in text
    assert "or use tensor_parallel_size=1" in text


def test_sequence_parallelism_without_norms_is_a_fault():
    (text,) = faults_of(GPT(), t=2, plan=PLAN, sequence_parallel=True)
    assert 'named with the style "sequence_parallel"' in text


def test_module_keeps_the_layout_of_its_first_run():
    module = GPT()
    layout, _ = lay_out(module, ParallelConfig(tensor_parallel_size=2, tensor_parallel_plan=PLAN), topology(t=2))
    remember(module, layout)
    assert layout_of(module) is layout
    again, faults = lay_out(module, ParallelConfig(tensor_parallel_size=2), topology(t=2, d=2))
    assert not faults
    assert again.placement is layout.placement
    (text,) = lay_out(module, ParallelConfig(tensor_parallel_size=4, tensor_parallel_plan=PLAN), topology(t=4))[1]
    assert "was split for tensor_parallel_size=2 and 1 stages" in text
    assert "asks for tensor_parallel_size=4 and 1 stages: build a new module" in text


def chosen(device_bytes, *, world_size=8, plan=PLAN, **sizes):
    config = ParallelConfig(tensor_parallel_plan=plan, **sizes)
    return choose_model_parallel(GPT(), config, world_size=world_size, devices_per_node=4, device_bytes=device_bytes)


def test_smallest_split_that_fits_is_chosen_tensor_before_pipeline():
    parameters = sum(p.numel() for p in GPT().parameters())
    whole = int(parameters * 16 / 0.6) + 1  # weights, gradients and two moments in 0.6 of a device
    assert chosen(whole) == (1, 1)
    assert chosen(whole - 100) == (2, 1)
    assert chosen(whole // 2 - 100) == (4, 1)
    assert chosen(whole // 4 - 100) == (4, 2)
    assert chosen(1) == (4, 2), "nothing fits: the most that eight processes allow"


def test_sizes_that_were_asked_stay():
    assert chosen(1, tensor_parallel_size=2) == (2, 4)
    assert chosen(1 << 40, tensor_parallel_size=2) == (2, 1)
    assert chosen(1, pipeline_parallel_size=1) == (4, 1)


def test_module_without_a_plan_is_split_in_stages():
    assert chosen(1, plan=None) == (1, 4)


def test_ranks_of_a_host_share_its_memory():
    one, two = (memory_of(torch.device("cpu"), n) for n in (1, 2))
    assert one // 2 == two
    assert one > 1 << 20
