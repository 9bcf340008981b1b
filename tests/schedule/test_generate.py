import pytest

from lightning_ptdp.schedule import (
    choose,
    forward_only,
    generate,
    gpipe,
    interleaved,
    live_activations,
    max_live,
    one_f_one_b,
    show,
)

from .grid import ALL, cases


def test_gpipe_is_this_table():
    assert show(gpipe(p=2, m=3)) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_gpipe_takes_chunks_one_after_the_other():
    assert show(gpipe(p=2, m=3, v=2)) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
    ]


def test_one_f_one_b_is_this_table():
    assert show(one_f_one_b(p=2, m=3)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_one_f_one_b_with_fewer_microbatches_than_ranks_is_this_table():
    assert show(one_f_one_b(p=4, m=2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_interleaved_is_this_table():
    assert show(interleaved(p=2, m=4, v=2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_interleaved_leaves_out_the_microbatches_that_fill_the_last_group():
    assert show(interleaved(p=2, m=3, v=2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2",
    ]


def test_interleaved_with_one_microbatch_passes_all_stages_and_back():
    assert show(interleaved(p=2, m=1, v=2)) == ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]


def test_interleaved_is_the_order_of_figure_4():
    """SC'21 figure 4 bottom (p=4, m=8, v=2), first and last device up to the first backward of chunk 0."""
    first, *_, last = show(interleaved(p=4, m=8, v=2))
    assert first.startswith("0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 ")
    assert last.startswith("3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 ")


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 32, 4)])
def test_interleaved_warm_up_is_the_published_one(p, m, v):
    for rank, steps in enumerate(show(interleaved(p=p, m=m, v=v))):
        first_backward = next(i for i, word in enumerate(steps.split()) if "B" in word)
        assert first_backward == 2 * (p - rank - 1) + (v - 1) * p + 1  # the warm-up, and the forward of the first turn


def test_forward_only_is_this_table():
    assert show(forward_only(p=2, m=3, v=2)) == ["0F0 0F1 2F0 2F1 0F2 2F2", "1F0 1F1 3F0 3F1 1F2 3F2"]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("schedule", ALL)
def test_live_activations_reach_their_bound_and_no_more(schedule, p):
    for m, v, program in cases(schedule, p):
        bound = [max_live(schedule, p=p, m=m, v=v, rank=rank) for rank in range(p)]
        assert live_activations(program) == bound, (m, v)


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "peaks"),
    [
        ("gpipe", 4, 8, 1, [8, 8, 8, 8]),
        ("gpipe", 2, 8, 2, [16, 16]),
        ("1f1b", 4, 8, 1, [4, 3, 2, 1]),
        ("1f1b", 4, 2, 1, [2, 2, 2, 1]),
        ("interleaved", 2, 8, 2, [5, 3]),
        ("interleaved", 4, 8, 2, [11, 9, 7, 5]),
        ("interleaved", 4, 4, 2, [8, 8, 7, 5]),
        ("interleaved", 4, 5, 2, [9, 9, 7, 5]),
        ("interleaved", 4, 2, 2, [4, 4, 4, 3]),
    ],
)
def test_max_live_is_this_number(schedule, p, m, v, peaks):
    assert [max_live(schedule, p=p, m=m, v=v, rank=rank) for rank in range(p)] == peaks


def test_interleaved_bound_is_the_published_one_for_multiples_and_never_above_the_next_multiple():
    for p in range(1, 9):
        for v in range(1, 5):
            for m in range(1, 4 * p + 1):
                multiple = -(-m // p) * p
                for rank in range(p):
                    published = min(multiple * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
                    bound = max_live("interleaved", p=p, m=m, v=v, rank=rank)
                    assert bound == published if m == multiple else bound <= published, (p, m, v, rank)


def test_generate_finds_each_schedule_by_name():
    sizes = {"pipeline_parallel_size": 2, "num_microbatches": 3}
    assert generate("gpipe", **sizes, virtual_pipeline_size=2) == gpipe(p=2, m=3, v=2)
    assert generate("1f1b", **sizes) == one_f_one_b(p=2, m=3)
    assert generate("interleaved", **sizes, virtual_pipeline_size=2) == interleaved(p=2, m=3, v=2)
    assert generate("forward_only", **sizes, virtual_pipeline_size=2) == forward_only(p=2, m=3, v=2)


def test_auto_interleaves_where_a_rank_has_several_chunks():
    assert choose(pipeline_parallel_size=4, virtual_pipeline_size=1) == "1f1b"
    assert choose("auto", pipeline_parallel_size=4, virtual_pipeline_size=2) == "interleaved"
    assert choose("gpipe", pipeline_parallel_size=4, virtual_pipeline_size=2) == "gpipe"


REMEDY = "1f1b runs one chunk a rank; got virtual_pipeline_size=2; use schedule='interleaved'"


def test_one_f_one_b_with_chunks_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=REMEDY):
        generate("1f1b", pipeline_parallel_size=2, num_microbatches=4, virtual_pipeline_size=2)
    with pytest.raises(ValueError, match=REMEDY):
        choose("1f1b", pipeline_parallel_size=2, virtual_pipeline_size=2)
    with pytest.raises(ValueError, match=REMEDY):
        max_live("1f1b", p=2, m=4, v=2, rank=0)


def test_unknown_schedules_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'gpipe', '1f1b', 'interleaved', 'forward_only'\); got 'zb'"):
        generate("zb", pipeline_parallel_size=2, num_microbatches=4)
    with pytest.raises(ValueError, match=r"'auto' or one of \('gpipe', '1f1b', 'interleaved'\); got 'forward_only'"):
        choose("forward_only", pipeline_parallel_size=2, virtual_pipeline_size=1)
    with pytest.raises(ValueError, match="got 'zb'"):
        max_live("zb", p=2, m=4, v=1, rank=0)


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("size", ["pipeline_parallel_size", "num_microbatches"])
def test_sizes_below_one_are_refused(schedule, size):
    sizes = {"pipeline_parallel_size": 2, "num_microbatches": 4, size: 0}
    with pytest.raises(ValueError, match=rf"{size} \([pm]\) counts from 1; got 0"):
        generate(schedule, **sizes)


def test_rank_outside_the_pipeline_is_refused():
    with pytest.raises(ValueError, match=r"0\.\.p-1; got rank=2, p=2"):
        max_live("gpipe", p=2, m=4, v=1, rank=2)
