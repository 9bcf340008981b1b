import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import MeanMetric

from lightning_ptdp.steps.log_calls import ALREADY_SYNCED, LogCalls
from lightning_ptdp.steps.log_recorder import LogRecorder
from lightning_ptdp.steps.metrics import StepMetrics

CPU = torch.device("cpu")


class Noted(pl.LightningModule):
    """Takes down what reaches Lightning's own `log`."""

    def __init__(self):
        super().__init__()
        self.calls, self.metric = [], MeanMetric()

    def log(self, name, value, *args, **kwargs):
        self.calls.append((name, value, kwargs))


def recorder_of(module):
    calls, metrics = LogCalls(module), StepMetrics(module)
    recorder = LogRecorder(module, calls, metrics)
    recorder.attach()
    return recorder, calls, metrics


def step(*microbatches, weights=None, sizes=None, counts=True):
    """What Lightning's `log` gets for a step, whose microbatches each are a function of the module."""
    module = Noted()
    recorder, calls, metrics = recorder_of(module)
    with recorder.recording():
        for i, microbatch in enumerate(microbatches):
            with (
                recorder.microbatch(i, sizes[i] if sizes else 1, keep=True),
                metrics.microbatch(counts=len(microbatches) > 1),
            ):
                microbatch(module)
        merged = recorder.merged(weights or [1.0] * len(microbatches), counts=counts)
    calls.replay(merged, CPU)
    return module.calls


def test_value_of_a_step_is_the_weighted_mean_of_its_microbatches():
    ((name, value, arguments),) = step(
        lambda m: m.log("loss", torch.tensor(1.0)),
        lambda m: m.log("loss", torch.tensor(5.0)),
        weights=[3.0, 1.0],
        sizes=[2, 1],
    )
    assert (name, value.item(), arguments["batch_size"]) == ("loss", 2.0, 3)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 2.0), (torch.mean, 2.0), ("sum", 4.0), (sum, 4.0), ("min", 1.0), (max, 3.0)]
)
def test_values_merge_by_their_reduction(reduce_fx, expected):
    calls = step(*(lambda m, v=v: m.log("x", v, reduce_fx=reduce_fx) for v in (1.0, 3.0)))
    assert [value.item() for _, value, _ in calls] == [expected]


def test_arguments_reach_lightning_as_they_were_given():
    ((_, _, arguments),) = step(lambda m: m.log("x", 1.0, True, on_epoch=True, logger=False))
    assert arguments == {"prog_bar": True, "on_epoch": True, "logger": False, "batch_size": 1}


def test_synced_value_is_marked_as_merged_already():
    ((_, _, arguments),) = step(lambda m: m.log("x", 1.0, sync_dist=True))
    assert arguments["sync_dist_group"] == ALREADY_SYNCED


def test_batch_size_that_the_user_gives_goes_before_the_rows():
    ((_, _, arguments),) = step(*(lambda m: m.log("x", 1.0, batch_size=7) for _ in range(2)), sizes=[2, 2])
    assert arguments["batch_size"] == 14


def test_dicts_of_values_are_logged_one_by_one():
    calls = step(lambda m: m.log_dict({"a": 1.0, "b": 2.0}, on_step=True))
    assert [(name, value.item()) for name, value, _ in calls] == [("a", 1.0), ("b", 2.0)]


def test_graph_of_a_value_is_not_kept():
    ((_, value, _),) = step(lambda m: m.log("x", torch.ones((), requires_grad=True) * 2))
    assert value.grad_fn is None


def test_wide_values_stay_wide_and_whole_numbers_become_floats():
    calls = step(lambda m: (m.log("wide", torch.tensor(0.1, dtype=torch.float64)), m.log("whole", torch.tensor(3))))
    assert [value.dtype for _, value, _ in calls] == [torch.float64, torch.float32]


def test_what_does_not_count_has_no_samples():
    module = Noted()
    recorder, _, _ = recorder_of(module)
    with recorder.recording():
        with recorder.microbatch(0, 5, keep=True):
            module.log("x", 1.0)
        assert [value.batch_size for value in recorder.merged([0.0], counts=False)] == [0.0]
        assert [value.batch_size for value in recorder.merged([0.0])] == [5.0]


def test_calls_of_a_stage_below_the_last_are_dropped():
    module = Noted()
    recorder, _, _ = recorder_of(module)
    with recorder.recording():
        with recorder.microbatch(0, 1, keep=False):
            module.log("x", 1.0)
        assert recorder.merged([1.0]) == ()


def test_outside_a_step_and_after_the_run_log_is_lightnings_own():
    module = Noted()
    recorder, _, _ = recorder_of(module)
    module.log("between", 1.0)
    recorder.detach()
    module.log("after", 2.0)
    assert [name for name, _, _ in module.calls] == ["between", "after"]
    assert "log" not in vars(module)


def test_metric_is_logged_as_the_object_under_its_name():
    def microbatch(module):
        module.metric(4.0)
        module.log("metric", module.metric)

    ((_, shown, arguments),) = step(microbatch)
    assert isinstance(shown, MeanMetric)
    assert arguments["metric_attribute"] == "metric"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.log("x", torch.ones(2)), "must have a single element"),
        (lambda m: m.log("x", "text"), "`str` values cannot be logged"),
        (lambda m: m.log("x", 1.0, reduce_fx=torch.median), "only min, max, mean and sum can be merged"),
        (lambda m: m.log("x", MeanMetric()), r"no attribute of the module; it has \['metric'\]"),
    ],
)
def test_what_cannot_be_logged_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        step(call)
