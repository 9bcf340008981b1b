import pytest
import torch

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.steps.exchange import Exchange, Key, Logged, StepReport, merge
from lightning_ptdp.topology import Topology
from tests.spmd import run_spmd


def key(name="loss", reduce="mean", *, is_synced=True):
    return Key(name=name, reduce=reduce, is_synced=is_synced, arguments=(), dtype=torch.float32)


def logged(value, weight=1.0, batch_size=1.0, **of_key):
    return Logged(key(**of_key), value, weight, batch_size)


def report(*values, weight=1.0, weighted_loss=0.0, scale=1.0, num_samples=1.0):
    return StepReport(weight, weighted_loss, scale, num_samples, False, values)


@pytest.mark.parametrize(
    ("reduce", "expected"), [("mean", (1 * 3 + 5 * 1) / 4), ("sum", 6.0), ("min", 1.0), ("max", 5.0)]
)
def test_values_of_one_key_merge_by_its_reduction(reduce, expected):
    merged = merge([logged(1.0, 3.0, 4.0, reduce=reduce), logged(5.0, 1.0, 2.0, reduce=reduce)])
    assert (merged.value, merged.weight, merged.batch_size) == (expected, 4.0, 6.0)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_what_weighs_nothing_does_not_count_even_if_it_is_nan(reduce):
    assert merge([logged(2.0, 1.0, reduce=reduce), logged(float("nan"), 0.0, reduce=reduce)]).value == 2.0


def test_loss_and_factor_of_a_step():
    step = report(weight=4.0, weighted_loss=6.0, scale=8.0)
    assert (step.loss, step.factor) == (1.5, 2.0)


def test_step_in_which_nothing_counts_is_zero():
    step = report(weight=0.0, weighted_loss=0.0, scale=8.0)
    assert (step.loss, step.factor) == (0.0, 0.0)


def told(p, d, by_replica):
    """What each rank is told, where the last stage of replica r reports by_replica[r], step after step."""
    groups = Groups.create(Topology(1, p, d), "cpu")
    exchange, at = Exchange(groups), groups.at
    found = [exchange.tell_all(mine if at.pipeline == p - 1 else None) for mine in by_replica[at.data]]
    groups.destroy()
    return found


def test_every_rank_of_a_pipeline_learns_what_the_last_stage_knows():
    steps = [report(logged(1.0), weighted_loss=2.0), report(logged(3.0), logged(4.0, name="more"), scale=2.0), report()]
    assert run_spmd(told, world_size=3, p=3, d=1, by_replica=[steps]) == [steps] * 3


def test_replicas_merge_all_but_their_scale():
    first = report(logged(1.0, 1.0, 2.0), weight=1.0, weighted_loss=1.0, scale=8.0, num_samples=2.0)
    second = report(logged(5.0, 3.0, 3.0), weight=3.0, weighted_loss=15.0, scale=2.0, num_samples=3.0)
    results = run_spmd(told, world_size=4, p=2, d=2, by_replica=[[first], [second]])
    for rank, (found,) in enumerate(results):
        assert (found.weight, found.weighted_loss, found.num_samples) == (4.0, 16.0, 5.0)
        assert found.scale == (8.0, 2.0)[rank % 2]
        assert found.logged == (logged(4.0, 4.0, 5.0),)


def test_values_that_are_not_synced_stay_the_replicas_own():
    by_replica = [[report(logged(1.0, is_synced=False))], [report(logged(5.0, is_synced=False))]]
    values = [found.logged[0].value for (found,) in run_spmd(told, world_size=2, p=1, d=2, by_replica=by_replica)]
    assert values == [1.0, 5.0]


@pytest.mark.parametrize("p", [1, 2])
def test_key_that_one_replica_alone_logged_is_known_to_all(p):
    by_replica = [[report(logged(1.0))], [report(logged(3.0), logged(7.0, name="rare"))]]
    for (found,) in run_spmd(told, world_size=2 * p, p=p, d=2, by_replica=by_replica):
        assert {value.key.name: value.value for value in found.logged} == {"loss": 2.0, "rare": 7.0}


def test_schemas_may_change_from_step_to_step():
    steps = [report(logged(float(i), name=f"step {i}")) for i in (0, 1, 0, 2)]
    assert run_spmd(told, world_size=2, p=2, d=1, by_replica=[steps]) == [steps] * 2


def test_numbers_cross_in_full_precision():
    value = 0.1 + 2**-50
    (found,), _ = run_spmd(told, world_size=2, p=2, d=1, by_replica=[[report(logged(value))]])
    assert found.logged[0].value == value


def agree(t, p, d, by_rank):
    """What each rank is told of a hook in which rank r logged by_rank[r]."""
    groups = Groups.create(Topology(t, p, d), "cpu")
    found = Exchange(groups).agree(by_rank[groups.rank])
    groups.destroy()
    return found


def test_tensor_peers_take_the_word_of_the_first():
    results = run_spmd(share_apart, world_size=2)
    assert [found.logged[0].value for found in results] == [1.0, 1.0]


def share_apart():
    groups = Groups.create(Topology(2, 1, 1), "cpu")
    found = Exchange(groups).tell_all(report(logged(1.0 + groups.at.tensor)))
    groups.destroy()
    return found


def test_hooks_that_log_alike_keep_their_own_and_merge_what_is_synced():
    by_rank = [(logged(float(rank)), logged(float(rank), name="own", is_synced=False)) for rank in range(2)]
    told = run_spmd(agree, t=1, p=1, d=2, by_rank=by_rank)
    assert [[value.value for value in found] for found in told] == [[0.5, 0.0], [0.5, 1.0]]


def test_key_of_one_rank_reaches_its_replica_and_all_if_it_is_synced():
    by_rank = [(logged(3.0), logged(4.0, name="own", is_synced=False)), (), (), ()]
    told = run_spmd(agree, world_size=4, t=1, p=2, d=2, by_rank=by_rank)
    names = [{value.key.name: value.value for value in found} for found in told]
    assert names == [{"loss": 3.0, "own": 4.0}, {"loss": 3.0}] * 2


def test_ranks_that_differ_are_told_in_one_order():
    first, second = logged(1.0, name="first"), logged(2.0, name="second")
    told = run_spmd(agree, world_size=2, t=1, p=2, d=1, by_rank=[(second,), (first, second)])
    assert [[value.key.name for value in found] for found in told] == [["second", "first"]] * 2


def test_hook_in_which_nobody_logs_ends_with_nothing():
    assert run_spmd(agree, t=2, p=1, d=1, by_rank=[(), ()]) == [(), ()]
