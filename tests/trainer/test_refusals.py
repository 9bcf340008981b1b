"""What cannot run is refused by name, on every rank and at once; what the machine lacks is not missed (PO-05)."""

import os
import sys
import time
from unittest.mock import patch

import pytest

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.kernels import library, status
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, assert_same, join, quiet_trainer, serial, train
from tests.spmd import run_spmd


def refusal(make, strategy):
    """What this rank is told, and after how long."""
    start = time.monotonic()
    with pytest.raises(ValueError, match="PTDPStrategy cannot run this") as caught:
        quiet_trainer(PTDPStrategy(**strategy)).fit(make(), datamodule=ReplicaBatches([texts(4)]))
    return str(caught.value), time.monotonic() - start


def refusals(make=GPT, world_size=2, **strategy):
    """The one text that every rank is told, within ten seconds."""
    told = run_spmd(refusal, world_size=world_size, make=make, strategy=strategy)
    assert max(seconds for _, seconds in told) < 10
    assert len({text for text, _ in told}) == 1
    return told[0][0]


def test_number_of_processes_must_fit():
    text = refusals(world_size=3, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert "got 3 processes for tensor_parallel_size=2 * pipeline_parallel_size=2 = 4" in text
    assert "use devices * num_nodes = 4" in text


def test_more_stages_than_layers():
    text = refusals(pipeline_parallel_size=2, virtual_pipeline_size=3)
    assert "each of the p * v = 6 stages needs a block, and 'blocks' has 4" in text
    assert "use pipeline_parallel_size * virtual_pipeline_size <= 4" in text


def test_all_faults_are_told_at_once():
    text = refusals(pipeline_parallel_size=4, virtual_pipeline_size=2, data_parallel_size=3)
    assert "must be t * p * d: got 2 processes" in text
    assert "p * v = 8 stages needs a block" in text


def test_manual_optimization_is_refused_under_a_pipeline():
    assert "use automatic optimization, or pipeline_parallel_size=1" in refusals(ManualGPT, pipeline_parallel_size=2)


@pytest.mark.parametrize("with_other_apex", [False, True], ids=["bare machine", "an unrelated apex"])
def test_no_optional_package_is_needed(with_other_apex, tmp_path):
    if with_other_apex:
        (tmp_path / "apex.py").write_text("raise ImportError('this apex is a web toolkit')\n")
    batches = [texts(4, seed=i) for i in range(2)]
    parts = run_spmd(train_on_a_bare_machine, world_size=2, batches=batches, folder=str(tmp_path))
    assert_same(join(parts), serial(GPT, batches))


def train_on_a_bare_machine(batches, folder):
    """No compiled kernels and no optional package is loaded, and the usual variable is not set."""
    bare = library.Library(None, "no C++ compiler")
    with (
        patch.object(sys, "path", [folder, *sys.path]),
        patch.dict(os.environ),
        patch.object(library, "load", lambda: bare),
        patch.object(status, "load", lambda: bare),
        patch("lightning_ptdp.preflight.whole.rank_zero_info") as said,
    ):
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        part = train(GPT, batches, {}, {"pipeline_parallel_size": 2})
        (line,) = [call.args[0] for call in said.call_args_list if "kernels:" in call.args[0]]
        assert "kernels: none compiled, PyTorch's own operations serve (no C++ compiler)" in line
        has_other_apex = os.path.exists(os.path.join(folder, "apex.py"))
        assert ("the package apex is not NVIDIA's and is left alone" in line) == has_other_apex
        assert not {"apex", "transformer_engine", "lightning_ptdp._C"} & sys.modules.keys()
    return part


class ManualGPT(GPT):
    """Steps by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_stays_allowed_without_a_pipeline():
    batches = [texts(4, seed=i) for i in range(2)]
    losses = run_spmd(losses_by_hand, world_size=1, batches=batches)
    assert losses[0] == pytest.approx(serial(GPT, batches).losses, abs=1e-10)


def losses_by_hand(batches):
    module = SteppingGPT()
    quiet_trainer(PTDPStrategy(), precision="64-true").fit(module, datamodule=ReplicaBatches(batches))
    return module.losses


class SteppingGPT(ManualGPT):
    """Steps by hand, and remembers its losses."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss, optimizer = self.loss(batch), self.optimizers()
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
