"""Which optimizers may step a part of the parameters is known by name, or found by trying."""

import pytest
import torch
from torch import nn, optim

from lightning_ptdp.compat.apex import FusedAdam
from lightning_ptdp.kernels.status import _APEX_FILES
from lightning_ptdp.preflight import optimizer_probe
from lightning_ptdp.preflight.optimizer_probe import judge
from tests.trainer.broken import Around, GlobalNorm, Lamb, NeedsCuda


def parameters(*, matrices=False):
    module = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    return [p for p in module.parameters() if p.ndim == 2 or not matrices]


class OwnAdamW(optim.AdamW):
    """Not known by name."""


class Noisy(optim.SGD):
    """Draws random numbers."""

    def step(self, closure=None):
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        return super().step()


class Idle(optim.SGD):
    """Does nothing."""

    def step(self, closure=None):
        return closure()


KINDS = [
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
]


FUSED = [(kind, {"fused": True}) for kind in (optim.Adagrad, optim.Adam, optim.AdamW, optim.SGD)]  # on CPUs


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {"foreach": each}) for kind in KINDS for each in (None, True, False)), *FUSED],
    ids=repr,
)
def test_what_is_known_by_name_is_found_by_trying(kind, options):
    assert optimizer_probe._tried(kind(parameters(), lr=0.01, **options)).is_elementwise
    assert judge(kind(parameters(), lr=0.01, **options)).is_elementwise


@pytest.mark.parametrize(
    ("optimizer", "is_parameterwise", "is_elementwise"),
    [
        (lambda: OwnAdamW(parameters()), True, True),
        (lambda: optim.Adafactor(parameters()), True, False),
        (lambda: optim.Muon(parameters(matrices=True)), True, False),
        (lambda: Lamb(parameters()), True, False),
        (lambda: optim.LBFGS(parameters()), False, False),
        (lambda: GlobalNorm(parameters(), lr=0.1), False, False),
        (lambda: Noisy(parameters(), lr=0.1), False, False),
    ],
    ids=["own AdamW", "Adafactor", "Muon", "LAMB", "LBFGS", "norm over all", "random"],
)
def test_optimizers_are_judged_by_what_they_do(optimizer, is_parameterwise, is_elementwise):
    verdict = judge(optimizer())
    assert (verdict.is_parameterwise, verdict.is_elementwise) == (is_parameterwise, is_elementwise)
    assert not verdict.unknown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "references"])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_word_of_our_fused_adam_is_true(adam_w_mode, dtype):
    optimizer = FusedAdam(parameters(), lr=0.01, weight_decay=0.1, adam_w_mode=adam_w_mode)
    assert judge(optimizer).is_elementwise
    assert optimizer_probe._try(optimizer, dtype).is_elementwise


@pytest.mark.parametrize(("files", "is_known"), [(_APEX_FILES, True), ((), False)], ids=["NVIDIA's", "another's"])
def test_optimizer_of_a_real_apex_is_known_by_name(files, is_known, tmp_path, monkeypatch):
    """A stand-in that cannot be tried, as Apex's without CUDA; which Apex is installed is told by its files."""
    for file in ("__init__.py", *files):
        (tmp_path / "apex" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex" / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    kind = type("FusedAdam", (NeedsCuda,), {"__module__": "apex.optimizers.fused_adam", "__qualname__": "FusedAdam"})
    verdict = judge(kind(parameters(), lr=0.1))
    assert verdict.is_elementwise == is_known
    assert bool(verdict.unknown) != is_known


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda: Around(parameters(), optim.SGD), "asks for inner"),
        (lambda: NeedsCuda(parameters(), lr=0.1), "RuntimeError: only on CUDA"),
        (lambda: optim.SparseAdam(parameters()), "does not support dense gradients"),
        (lambda: Idle(parameters(), lr=0.1), "have the size 0.0"),
    ],
    ids=["of another", "needs a device", "sparse", "idle"],
)
def test_what_cannot_be_tried_says_why(optimizer, why):
    verdict = judge(optimizer())
    assert why in verdict.unknown
    assert not verdict.is_parameterwise


def test_rate_that_a_schedule_starts_at_zero_hides_nothing():
    optimizer = GlobalNorm(parameters(), lr=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert not judge(optimizer).is_parameterwise


def test_word_of_the_optimizer_is_taken():
    optimizer = NeedsCuda(parameters(), lr=0.1)
    optimizer.is_elementwise = True
    assert judge(optimizer).is_elementwise
    optimizer.is_elementwise = False
    assert not judge(optimizer).is_elementwise


def test_trying_leaves_no_trace():
    given = parameters()
    optimizer, before = Noisy(given, lr=0.1), [p.detach().clone() for p in given]
    state = torch.get_rng_state()
    judge(optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, was) and p.grad is None for p, was in zip(given, before, strict=True))
    assert not optimizer.state
