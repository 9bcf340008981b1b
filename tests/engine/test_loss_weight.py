import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_ptdp.engine.loss_weight import TargetCounter, weigh

LOGITS = torch.zeros(6, 3, requires_grad=True)
TARGETS = torch.tensor([0, 1, 2, -100, -100, 1])


def weight_of(step, num_samples=2):
    """The weight of a step that calls losses."""
    counter = TargetCounter()
    counter.start()
    try:
        output = step()
    finally:
        counter.stop()
    weight = weigh(output, counter.calls, num_samples)
    return float(weight.value), weight.unit


@pytest.mark.parametrize(
    "step",
    [
        lambda: F.cross_entropy(LOGITS, TARGETS),
        lambda: nn.CrossEntropyLoss()(LOGITS, TARGETS),
        lambda: F.nll_loss(F.log_softmax(LOGITS, -1), TARGETS),
        lambda: F.cross_entropy(LOGITS, TARGETS.clone().masked_fill(TARGETS == -100, 7), ignore_index=7),
        lambda: F.cross_entropy(LOGITS.view(2, 3, 3), TARGETS.view(2, 3), label_smoothing=0.1),
        lambda: F.cross_entropy(LOGITS, TARGETS) + F.cross_entropy(LOGITS * 2, TARGETS),
    ],
    ids=["function", "module", "nll_loss", "other ignored index", "two dims", "two calls that agree"],
)
def test_weight_is_the_number_of_real_targets(step):
    assert weight_of(step) == (4.0, 6.0)


def test_class_weights_are_summed_over_the_real_targets():
    """As PyTorch's own mean divides: 1 + 2 + 4 + 2."""
    weights = torch.tensor([1.0, 2.0, 4.0])
    assert weight_of(lambda: F.cross_entropy(LOGITS, TARGETS, weight=weights)) == (9.0, 6.0)


def test_probabilities_as_targets_all_count():
    assert weight_of(lambda: F.cross_entropy(LOGITS, torch.full((6, 3), 1 / 3))) == (6.0, 6.0)


@pytest.mark.parametrize(
    "step",
    [
        LOGITS.sum,
        lambda: F.mse_loss(LOGITS, torch.ones(6, 3)),
        lambda: F.cross_entropy(LOGITS, TARGETS.clamp(min=0), reduction="sum"),
        lambda: F.cross_entropy(LOGITS, TARGETS.clamp(min=0)) + F.cross_entropy(LOGITS[:2], TARGETS[:2]),
    ],
    ids=["no loss function", "another loss", "a sum of real targets", "calls that differ, nothing ignored"],
)
def test_weight_is_the_number_of_samples_where_no_target_is_ignored(step):
    assert weight_of(step, num_samples=2) == (2.0, 2.0)


@pytest.mark.parametrize(
    "step",
    [
        lambda: F.cross_entropy(LOGITS, TARGETS, reduction="none").mean(),
        lambda: F.cross_entropy(LOGITS, TARGETS, reduction="sum"),
        lambda: F.cross_entropy(LOGITS, TARGETS) + F.cross_entropy(LOGITS[:4], TARGETS[:4]),
    ],
    ids=["unreduced", "sum", "calls that differ"],
)
def test_ignored_targets_whose_weight_cannot_be_told_ask_for_it(step):
    with pytest.raises(ValueError, match=r'return the number of terms.*\{"loss": loss, "weight": number_of_real_targ'):
        weight_of(step)


@pytest.mark.parametrize("value", [5, 5.0, torch.tensor(5), torch.tensor([5.0])])
def test_weight_that_the_step_returns_goes_first(value):
    def step():
        return {"loss": F.cross_entropy(LOGITS, TARGETS), "weight": value}

    assert weight_of(step)[0] == 5.0


@pytest.mark.parametrize(
    ("value", "words"), [(-1, "at least 0; got -1"), ("many", "got 'many'"), (torch.ones(2), r"shape \(2,\)")]
)
def test_weight_must_be_one_number(value, words):
    with pytest.raises(ValueError, match=words):
        weigh({"loss": None, "weight": value}, [], 1)


def test_calls_without_gradients_do_not_count():
    def step():
        with torch.no_grad():
            F.cross_entropy(LOGITS[:2], TARGETS[:2])
        return F.cross_entropy(LOGITS, TARGETS)

    assert weight_of(step) == (4.0, 6.0)


def test_counter_that_stopped_sees_nothing():
    counter = TargetCounter()
    counter.stop()
    counter.start()
    counter.stop()
    F.cross_entropy(LOGITS, TARGETS)
    assert counter.calls == []
