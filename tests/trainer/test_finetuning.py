"""Parts of a model are frozen, and unfrozen, as in one process; what has nothing to train waits for nothing (PO-25)."""

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    LearningRateMonitor,
)
from torch import nn

from benchmarks.traffic import Traffic
from lightning_ptdp import PTDPStrategy
from tests.hygiene import seed_everything
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer, whole_state
from tests.spmd import run_spmd
from tests.trainer.test_layouts import PLAN

BATCHES = [texts(4, seed=i) for i in range(2)]
FIRST_HALF = ("token", "position", "blocks.0", "blocks.1")  # stage 0 of 2, and stages 0 and 1 of 4


class FilteringGPT(GPT):
    """Optimizes what is not frozen, as `BaseFinetuning` asks."""

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)


TIED = partial(FilteringGPT, tied=True)


class FreezeFirstHalf(BaseFinetuning):
    """Frozen until epoch 1."""

    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.get_submodule(name) for name in FIRST_HALF])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.get_submodule(name) for name in FIRST_HALF], optimizer)


class Snapshots(Callback):
    """The whole model's weights after each epoch, on rank 0."""

    def __init__(self):
        self.weights = []

    def on_train_epoch_end(self, trainer, pl_module):
        state = whole_state(trainer)
        self.weights.append({name: tensor.clone() for name, tensor in state.items()})


def strategy(t=1, p=1, v=1, d=1):
    return PTDPStrategy(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        virtual_pipeline_size=v,
        data_parallel_size=d,
        micro_batch_size=1,
        tensor_parallel_plan=PLAN if t > 1 else None,
    )


@contextmanager
def no_sync_advice():
    """Lightning advises a plain Trainer to reduce values, because the pool has a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"It is recommended to use `self\.log")
        yield


def fit(sizes, make, callbacks=(), batches=BATCHES, resume=None, **trainer):
    """Train in double; sizes: None for a plain Trainer."""
    seed_everything()
    chosen = "auto" if sizes is None else strategy(**sizes)
    made = quiet_trainer(chosen, callbacks=[*callbacks], precision="64-true", use_distributed_sampler=False, **trainer)
    module = make()
    with no_sync_advice():
        made.fit(module, datamodule=ReplicaBatches(batches), ckpt_path=resume)
    return made, module


def world(sizes):
    return sizes.get("t", 1) * sizes.get("p", 1) * sizes.get("d", 1)


def check_weights(weights, expected, tolerance=1e-10):
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=tolerance, msg=lambda text, at=name: f"{at}: {text}"
        )


def finetune(sizes, folder, make=TIED, freeze=FreezeFirstHalf, epochs=3, resume=None):
    """Weights after each epoch, what the callback keeps, the learning rates, and how many groups there are."""
    callback, snapshots, rates = freeze(), Snapshots(), LearningRateMonitor()
    trainer, _ = fit(
        sizes,
        make,
        [callback, snapshots, rates],
        max_epochs=epochs,
        resume=resume,
        logger=True,
        default_root_dir=folder,
        log_every_n_steps=1,
    )
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    return snapshots.weights, callback.state_dict(), rates.lrs, len(trainer.optimizers[0].param_groups)


def compare(many, one):
    """The ranks' results with those of one process."""
    for weights, expected in zip(many[0][0], one[0], strict=True):
        check_weights(weights, expected)
    for _, state, rates, num_groups in many:
        assert (state, rates, num_groups) == one[1:]


LAYOUTS = pytest.mark.parametrize(
    "sizes", [{"t": 2, "p": 2}, {"p": 2, "v": 2}, {"p": 2, "d": 2}], ids=["t2p2", "p2v2", "p2d2"]
)


@LAYOUTS
def test_frozen_stage_keeps_its_bits_then_joins_the_optimizer(sizes, tmp_path):
    (one,) = run_spmd(finetune, world_size=1, sizes=None, folder=str(tmp_path / "one"))
    many = run_spmd(finetune, world_size=world(sizes), timeout=60, sizes=sizes, folder=str(tmp_path / "many"))
    compare(many, one)
    assert one[3] == 2
    initial, (first, *_, last) = plain(TIED), many[0][0]
    frozen = [name for name in initial if name.startswith(FIRST_HALF)]
    assert all(torch.equal(first[name], initial[name]) for name in frozen)
    assert not any(torch.equal(last[name], initial[name]) for name in frozen)


def plain(make):
    seed_everything()
    return make().double().state_dict()


class Resumable(FreezeFirstHalf):
    """Trains what is not frozen any more in a resumed run, too."""

    def finetune_function(self, pl_module, epoch, optimizer):
        super().finetune_function(pl_module, epoch, optimizer)
        if epoch > 1:
            self.make_trainable([pl_module.get_submodule(name) for name in FIRST_HALF])


@pytest.mark.parametrize("saved", [None, {"t": 2, "p": 2}], ids=["from one process", "from t2p2"])
def test_run_resumes_with_the_groups_that_were_added(saved, tmp_path):
    (one,) = run_spmd(finetune, world_size=1, sizes=None, folder=str(tmp_path / "one"), freeze=Resumable)
    size = world(saved or {})
    run_spmd(finetune, world_size=size, timeout=60, sizes=saved, folder=str(tmp_path), freeze=Resumable, epochs=2)
    many = run_spmd(
        finetune,
        world_size=4,
        timeout=60,
        sizes={"t": 2, "p": 2},
        folder=str(tmp_path),
        freeze=Resumable,
        resume=str(tmp_path / "2.ckpt"),
    )
    check_weights(many[0][0][-1], one[0][-1])
    assert many[0][3] == 2


class BackboneGPT(FilteringGPT):
    """All before the head is its backbone."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict({name: self._modules.pop(name) for name in ("token", "position", "blocks")})

    def forward(self, ids, positions=None, is_real=None):
        x = self.backbone["token"](ids) + self.backbone["position"](torch.arange(ids.shape[1]))
        for block in self.backbone["blocks"]:
            x = block(x)
        return self.head(self.norm(x))


def test_backbone_is_unfrozen_and_its_rate_rises(tmp_path):
    kind = partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, lambda_func=threefold)
    arguments = {"make": BackboneGPT, "freeze": kind}
    (one,) = run_spmd(finetune, world_size=1, sizes=None, folder=str(tmp_path / "one"), **arguments)
    many = run_spmd(finetune, world_size=2, timeout=60, sizes={"p": 2}, folder=str(tmp_path / "many"), **arguments)
    compare(many, one)


def threefold(epoch):
    return 3.0


class AdapterGPT(GPT):
    """One weight trains. optimizes: all parameters, or only that one."""

    def __init__(self, adapter, *, optimizes="all"):
        super().__init__(tied=True)
        self.requires_grad_(False)
        self.get_parameter(adapter).requires_grad_()
        self.adapter, self.optimizes = adapter, optimizes

    def configure_optimizers(self):
        chosen = self.parameters() if self.optimizes == "all" else [self.get_parameter(self.adapter)]
        return torch.optim.AdamW(chosen, lr=0.01, weight_decay=0.1)


def train_adapter(sizes, make):
    """Weights, and bytes of gradients that each rank sent: of a pipeline's last rank, all that it sends."""
    snapshots = Snapshots()
    with Traffic() as traffic:
        fit(sizes, make, [snapshots])
    sent = traffic.elements(operation="send", dtype=torch.float64)
    return snapshots.weights[-1], sent


@pytest.mark.parametrize("optimizes", ["all", "one"])
@pytest.mark.parametrize(
    ("sizes", "adapter", "is_silent"),
    [
        ({"t": 2, "p": 2}, "blocks.3.norm_2.weight", True),
        ({"t": 2, "p": 2}, "blocks.3.down.weight", True),
        ({"t": 2, "p": 2}, "blocks.0.up.bias", False),
        ({"p": 2, "v": 2}, "blocks.2.down.weight", False),
        ({"p": 2, "d": 2}, "norm.bias", True),
    ],
)
def test_one_adapter_trains_and_no_gradient_goes_where_nothing_needs_it(sizes, adapter, is_silent, optimizes):
    make = partial(AdapterGPT, adapter, optimizes=optimizes)
    ((expected, _),) = run_spmd(train_adapter, world_size=1, sizes=None, make=make)
    many = run_spmd(train_adapter, world_size=world(sizes), timeout=60, sizes=sizes, make=make)
    check_weights(many[0][0], expected)
    initial = plain(make)
    assert {name for name, value in many[0][0].items() if not torch.equal(value, initial[name])} == {adapter}
    assert (many[0][1] == 0) == is_silent


class Thawing(GPT):
    """Its first block is frozen at first; the optimizer has it from the beginning."""

    def __init__(self, at):
        super().__init__(optimizer="momentum")
        self.blocks[0].requires_grad_(False)
        self.at = at

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == self.at:
            self.blocks[0].requires_grad_(True)


def thaw(sizes):
    snapshots = Snapshots()
    fit(sizes, partial(Thawing, 1), [snapshots], batches=[texts(4, seed=i) for i in range(3)])
    return snapshots.weights[-1]


def test_block_that_a_hook_unfreezes_between_batches_trains_from_there():
    (one,) = run_spmd(thaw, world_size=1, sizes=None)
    check_weights(run_spmd(thaw, world_size=4, timeout=60, sizes={"t": 2, "p": 2})[0], one)


class Regrouping(GPT):
    """Adds a group by hand."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_train_epoch_start(self):
        self.blocks[0].requires_grad_(True)
        self.optimizers().optimizer.add_param_group({"params": list(self.blocks[0].parameters())})


class RegroupingWhole(Regrouping):
    """Adds it as the refusal says."""

    def on_train_epoch_start(self):
        strategy = self.trainer.strategy
        with strategy.whole_model() if isinstance(strategy, PTDPStrategy) else nullcontext():
            super().on_train_epoch_start()


def regroup(sizes, make):
    snapshots = Snapshots()
    fit(sizes, make, [snapshots])
    return snapshots.weights[-1]


def test_groups_added_within_the_whole_model_are_those_of_one_process():
    (one,) = run_spmd(regroup, world_size=1, sizes=None, make=RegroupingWhole)
    check_weights(run_spmd(regroup, world_size=2, timeout=60, sizes={"p": 2}, make=RegroupingWhole)[0], one)


def refused(make, match, **trainer):
    with pytest.raises(RuntimeError, match=match):
        fit({"p": 2}, make, **trainer)


@pytest.mark.parametrize(
    ("make", "match", "trainer"),
    [
        (Regrouping, r"with trainer\.strategy\.whole_model", {}),
        (partial(Thawing, 1), "within a window of accumulate_grad_batches", {"accumulate_grad_batches": 2}),
    ],
    ids=["groups by hand", "within a window"],
)
def test_change_that_ranks_cannot_share_is_an_error(make, match, trainer):
    run_spmd(refused, world_size=2, timeout=60, make=make, match=match, **trainer)
