import pytest

from lightning_ptdp.config import ParallelConfig, divisors, micro_batch_size, recompute_every
from lightning_ptdp.schedule import SCHEDULES
from lightning_ptdp.topology import Topology


def faults(**settings):
    return ParallelConfig(**settings).faults(SCHEDULES)


def test_defaults_have_no_fault():
    assert faults() == []


@pytest.mark.parametrize(
    "name", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "micro_batch_size"]
)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "two", None])
def test_size_must_be_a_count_or_auto(name, value):
    (fault,) = faults(**{name: value})
    assert fault == f"{name} must be a whole number of at least 1 or 'auto'; got {value!r}"


def test_number_of_chunks_cannot_be_auto():
    assert faults(virtual_pipeline_size="auto") == [
        "virtual_pipeline_size must be a whole number of at least 1; got 'auto'"
    ]


def test_choices_are_listed():
    (fault,) = faults(schedule="2f2b")
    assert fault == "schedule must be one of 'auto', 'gpipe', '1f1b', 'interleaved'; got '2f2b'"


def test_all_faults_are_found_at_once():
    found = faults(tensor_parallel_size=0, pipeline_parallel_size=-1, schedule="none", eval_micro_batch_size=0)
    assert [fault.split()[0] for fault in found] == [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "eval_micro_batch_size",
        "schedule",
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"virtual_pipeline_size": 2, "pipeline_parallel_size": 1}, "use virtual_pipeline_size=1, or pipeline_par"),
        ({"virtual_pipeline_size": 2, "pipeline_parallel_size": 2, "schedule": "1f1b"}, "use schedule='interleaved'"),
        ({"sequence_parallel": True, "tensor_parallel_size": 1}, "leave it off"),
        ({"pipeline_split": (1, 0)}, "all at least 1; got [1, 0]"),
        ({"recompute": "full", "recompute_every": 0}, "recompute_every must be a whole number of at least 1; got 0"),
        ({"recompute": "full", "recompute_layers": [1, -1]}, "one whole number of at least 0 or a list of p * v"),
        ({"recompute": "full", "recompute_layers": (1,), "pipeline_parallel_size": 2}, "p * v = 2 * 1 = 2 stages; got"),
        ({"recompute_layers": 1}, "and recompute='none'; use recompute='full' or 'selective', or leave it out"),
        ({"recompute": "selective", "recompute_every": 2}, "and recompute='selective'; use recompute='full', or leave"),
        (
            {"recompute": "full", "recompute_modules": ["a"]},
            "and recompute='full'; use recompute='selective', or leave",
        ),
        ({"recompute": "selective", "recompute_modules": "a"}, "must be a list of name patterns of modules; got 'a'"),
        ({"pipeline_split": (1, 2), "pipeline_parallel_size": 3}, "p * v = 3 * 1 = 3 stages; got 2: [1, 2]"),
    ],
)
def test_settings_that_do_not_go_together_are_told_with_a_way_out(settings, words):
    (fault,) = faults(**settings)
    assert words in fault


def test_replicas_take_what_the_model_leaves():
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert config.resolve(12) == (Topology(2, 3, 2), [])


def test_automatic_model_parallel_sizes_are_those_given():
    assert ParallelConfig().resolve(8, model_parallel=(2, 2)) == (Topology(2, 2, 2), [])
    assert ParallelConfig(tensor_parallel_size=1).resolve(8, model_parallel=(2, 2)) == (Topology(1, 2, 4), [])


@pytest.mark.parametrize(
    ("world_size", "words"), [(3, "use devices * num_nodes = 4,"), (6, "use devices * num_nodes = 4 or 8,")]
)
def test_world_that_is_no_multiple_of_the_model_is_told_the_next_ones(world_size, words):
    _, (fault,) = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2).resolve(world_size)
    assert f"got {world_size} processes" in fault
    assert words in fault


def test_world_of_another_size_than_asked_is_a_fault():
    _, (fault,) = ParallelConfig(pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=1).resolve(2)
    assert "got 2 processes for tensor_parallel_size=1 * pipeline_parallel_size=2 * data_parallel_size=2 = 4" in fault


@pytest.mark.parametrize(
    ("requested", "rows", "p", "size"),
    [
        ("auto", 16, 1, 16),  # nothing to fill
        ("auto", 16, 2, 2),  # 8 microbatches
        ("auto", 20, 2, 2),  # 10
        ("auto", 3, 4, 1),  # never below one
        (3, 8, 2, 3),
        (8, 3, 2, 3),  # never above the batch
    ],
)
def test_microbatch_size(requested, rows, p, size):
    assert micro_batch_size(requested, rows, p) == size


def test_divisors_ascend():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("num_layers", "input_bytes", "intermediate_bytes", "best"),
    [(36, 2, 68, 1), (36, 2, 34, 2), (36, 1, 9, 2), (36, 1, 1, 6), (10, 3, 1, 5), (4, 100, 1, 4), (1, 1, 1, 1)],
)
def test_best_number_of_blocks_a_group_needs_least_memory(num_layers, input_bytes, intermediate_bytes, best):
    assert recompute_every(num_layers, input_bytes, intermediate_bytes) == best
    needs = {k: -(-num_layers // k) * input_bytes + k * intermediate_bytes for k in range(1, num_layers + 1)}
    assert needs[best] == min(needs.values())
