import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric

from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.steps.metrics import StepMetrics, connect_metrics, frozen_metrics
from lightning_ptdp.topology import Topology
from tests.spmd import run_spmd

CPU = torch.device("cpu")


class Measured(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.all = MeanMetric(), CatMetric()


def computed(p, d, epochs):
    """What every rank computes for each epoch, where the last stage of replica r saw the r-th values."""
    groups, module = Groups.create(Topology(1, p, d), "cpu"), Measured()
    connect_metrics(module, groups, lambda: False, CPU)
    found = []
    for by_replica in epochs:
        if groups.is_last_pipeline_rank:
            for value in by_replica[groups.at.data]:
                module.mean.update(value)
                module.all.update(value)
        found.append((module.mean.compute().item(), sorted(module.all.compute().reshape(-1).tolist())))
        module.mean.reset()
        module.all.reset()
    groups.destroy()
    return found


@pytest.mark.parametrize(("p", "d"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_every_rank_computes_what_the_last_stages_saw(p, d):
    epochs = [[[1.0, 2.0], [6.0, 7.0]][:d], [[3.0], [5.0]][:d]]
    expected = [
        (sum(values) / len(values), sorted(values))
        for values in ([value for replica in epoch for value in replica] for epoch in epochs)
    ]
    assert run_spmd(computed, world_size=p * d, p=p, d=d, epochs=epochs) == [expected] * (p * d)


def step_value():
    """Within a step a metric computes where it is, without its peers."""
    groups, module = Groups.create(Topology(1, 2, 1), "cpu"), Measured()
    connect_metrics(module, groups, lambda: True, CPU)
    value = module.mean(2.0).item() if groups.is_last_pipeline_rank else None
    groups.destroy()
    return value


def test_within_a_step_only_the_last_stage_computes():
    assert run_spmd(step_value) == [2.0, None]


def test_second_run_does_not_wrap_twice():
    assert run_spmd(connected_twice) == [(2.0, 1)] * 2


def connected_twice():
    groups, module, asked = Groups.create(Topology(1, 2, 1), "cpu"), Measured(), []
    for _ in range(2):
        connect_metrics(module, groups, lambda: bool(asked.append(1)), CPU)
    if groups.is_last_pipeline_rank:
        module.mean.update(2.0)
    value = module.mean.compute().item()
    groups.destroy()
    return value, len(asked)


def test_frozen_metrics_stand_where_they_stood():
    module = Measured()
    module.mean.update(1.0)
    module.all.update(1.0)
    with frozen_metrics(module):
        module.mean.update(9.0)
        module.all.update(9.0)
    assert module.mean.compute().item() == 1.0
    assert module.all.compute().tolist() == 1.0
    assert module.mean._update_count == 1


def test_frozen_metrics_are_restored_after_an_error_too():
    module = Measured()
    with pytest.raises(RuntimeError, match="not a number"):
        update_in_vain(module)
    module.all.update(1.0)
    assert module.all.compute().tolist() == 1.0


def update_in_vain(module):
    with frozen_metrics(module):
        module.all.update(9.0)
        raise RuntimeError("not a number")


class Spread(nn.Module):
    """Metrics of which a mean of values is no value."""

    def __init__(self):
        super().__init__()
        self.most, self.mean = MaxMetric(), MeanMetric()
        self.ratio = self.most / self.mean


def test_value_of_a_step_is_that_of_all_its_microbatches():
    module = Spread()
    steps = StepMetrics(module)
    for parts, expected in (((1.0, 3.0), 3.0 / 2.0), ((8.0, 4.0), 8.0 / 6.0)):
        steps.start()
        for value in parts:
            with steps.microbatch(counts=True):
                module.ratio(value)
        assert steps.value("ratio", default=torch.zeros(())).item() == pytest.approx(expected)


def test_metric_that_a_step_did_not_call_has_the_default():
    module = Spread()
    steps = StepMetrics(module)
    module.ratio(1.0)
    assert steps.value("ratio", default=torch.tensor(7.0)).item() == 7.0
    steps.close()
    with steps.microbatch(counts=True):
        module.ratio(1.0)
    assert steps.value("ratio", default=torch.tensor(7.0)).item() == 7.0
