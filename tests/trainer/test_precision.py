"""16-bit training: main weights, one loss scale for all ranks, skipped updates that change nothing (PO-17)."""

from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptdp import PTDPPrecision, PTDPStrategy
from lightning_ptdp.precision.plugin import MAX_SKIPPED
from tests.hygiene import seed_everything
from tests.kept import Kept
from tests.models import GPT, texts
from tests.oracle import ReplicaBatches, quiet_trainer, whole_state
from tests.spmd import PoolEnvironment, run_spmd

BATCHES = [texts(4, seed=i) for i in range(4)]


class WarmGPT(GPT):
    """With a warm-up of its learning rate."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = LambdaLR(optimizer, lambda step: (step + 1) / 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Spoiler(Callback):
    """Puts inf into one gradient on stage 0 of replica 1 in one step, and notes what happens."""

    def __init__(self, step):
        self.step, self.notes = step, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        at, handle = trainer.strategy.groups.at, None
        if batch_idx == self.step and at.pipeline == 0 and at.data == 1:
            parameter = next(p for n, p in pl_module.named_parameters() if n.endswith("up.weight"))
            handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        self.handle = handle

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.handle is not None:
            self.handle.remove()
        precision = trainer.strategy.precision
        moved = any(not torch.equal(self.before[n], p) for n, p in pl_module.named_parameters())
        self.notes.append((moved, precision.scale, trainer.optimizers[0].param_groups[0]["lr"]))


def train_with_overflow(sharded, folder):
    seed_everything()
    spoiler = Spoiler(1)
    strategy = PTDPStrategy(
        pipeline_parallel_size=2, data_parallel_size=2, micro_batch_size=1, distributed_optimizer=sharded
    )
    trainer = quiet_trainer(
        strategy,
        callbacks=[spoiler],
        plugins=[PTDPPrecision("16-mixed"), PoolEnvironment()],
        use_distributed_sampler=False,
    )
    trainer.fit(WarmGPT(), datamodule=ReplicaBatches(BATCHES))
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    again = PTDPPrecision("16-mixed")
    resumed = quiet_trainer(
        PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1),
        plugins=[again, PoolEnvironment()],
        use_distributed_sampler=False,
        max_epochs=1,
    )
    resumed.fit(WarmGPT(), datamodule=ReplicaBatches(BATCHES), ckpt_path=f"{folder}/last.ckpt")
    counts = strategy.precision.num_updates, strategy.precision.num_skipped
    return spoiler.notes, counts, strategy.precision.state_dict(), again.state_dict()


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.filterwarnings("ignore")
def test_overflow_of_one_rank_skips_the_step_on_all(sharded, tmp_path):
    results = run_spmd(train_with_overflow, world_size=4, timeout=60, sharded=sharded, folder=str(tmp_path))
    rates = [0.01 * n / 8 for n in (2, 2, 3, 4)]
    for notes, counts, saved, loaded in results:
        moved, scales, seen = zip(*notes, strict=True)
        assert moved == (True, False, True, True)
        assert scales == (65536.0, 32768.0, 32768.0, 32768.0)
        assert seen == pytest.approx(rates), "the schedule stands still in the second step"
        assert counts == (3, 1)
        assert loaded == saved


def train_true(sizes, sharded, precision="bf16-true", batches=BATCHES):
    seed_everything()
    t, p, d = sizes
    strategy = PTDPStrategy(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        data_parallel_size=d,
        micro_batch_size=1,
        distributed_optimizer=sharded,
    )
    trainer = quiet_trainer(
        strategy, plugins=[PTDPPrecision(precision), PoolEnvironment()], use_distributed_sampler=False, max_epochs=2
    )
    module = GPT(optimizer="adamw", lr=0.01, tied=True)
    trainer.fit(module, datamodule=ReplicaBatches(batches))
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    assert all(p.dtype == torch.float32 for p in held)
    states = [v for s in trainer.optimizers[0].state.values() for v in s.values() if v.ndim]
    assert all(v.dtype == torch.float32 for v in states)
    numbers = sum(p.numel() for p in held)
    return {name: value.float() for name, value in whole_state(trainer).items()}, numbers


@pytest.mark.parametrize(
    ("sizes", "sharded"), [((1, 2, 1), False), ((1, 1, 2), False), ((1, 1, 2), True), ((1, 2, 2), True)]
)
def test_true_16_bits_are_near_float32_and_the_same_in_every_layout(sizes, sharded):
    t, p, d = sizes
    results = run_spmd(train_true, world_size=t * p * d, timeout=60, sizes=sizes, sharded=sharded)
    ((one, whole),) = run_spmd(train_true, world_size=1, sizes=(1, 1, 1), sharded=False)
    for name, value in one.items():
        torch.testing.assert_close(results[0][0][name], value, rtol=0.05, atol=0.02)
    if sharded and p == 1:
        assert sum(numbers for _, numbers in results) == whole, "each element is stepped by one replica"


def saved_bits(folder):
    """Main weights before and after a checkpoint."""
    seed_everything()

    def run(ckpt=None, epochs=1):
        strategy = PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1)
        trainer = quiet_trainer(
            strategy,
            plugins=[PTDPPrecision("bf16-true"), PoolEnvironment()],
            use_distributed_sampler=False,
            max_epochs=epochs,
        )
        trainer.fit(GPT(optimizer="adamw"), datamodule=ReplicaBatches(BATCHES), ckpt_path=ckpt)
        return trainer

    first = run()
    first.save_checkpoint(f"{folder}/last.ckpt")
    again = run(f"{folder}/last.ckpt")
    pairs = zip(held(first), held(again), strict=True)
    return [torch.equal(a, b) and a.dtype == torch.float32 for a, b in pairs]


def held(trainer):
    return [p for group in trainer.optimizers[0].param_groups for p in group["params"]]


def test_main_weights_survive_a_checkpoint_bit_for_bit(tmp_path):
    for same in run_spmd(saved_bits, world_size=2, timeout=60, folder=str(tmp_path)):
        assert len(same) > 5
        assert all(same)


def weights_only(folder):
    """Main weights after loading weights alone, which are not representable in 16 bits."""
    seed_everything()
    state = {name: torch.full_like(p, 1 / 3) for name, p in GPT().state_dict().items()}
    if torch.distributed.get_rank() == 0:
        torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.0"}, f"{folder}/weights.ckpt")
    torch.distributed.barrier()
    strategy = PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=1)
    module, seen = GPT(optimizer="adamw"), []

    class Look(Callback):
        def on_train_start(self, trainer, pl_module):
            strategy.load_model_state_dict(torch.load(f"{folder}/weights.ckpt", weights_only=True))
            seen.extend(bool((p == torch.tensor(1 / 3)).all()) for p in held(trainer))
            seen.extend(bool((p == torch.tensor(1 / 3).bfloat16()).all()) for p in module.parameters())

    trainer = quiet_trainer(
        strategy,
        callbacks=[Look()],
        plugins=[PTDPPrecision("bf16-true"), PoolEnvironment()],
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=ReplicaBatches(BATCHES[:1]))
    return seen


def test_loading_weights_alone_refreshes_the_main_weights(tmp_path):
    for seen in run_spmd(weights_only, world_size=2, timeout=60, folder=str(tmp_path)):
        assert len(seen) > 10
        assert all(seen)


class Casts(TorchDispatchMode):
    """Counts copies in 16 bits of some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.names, self.seen = {t.data_ptr(): name for name, t in tensors}, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and output.dtype == torch.bfloat16:
            self.seen.update([self.names[args[0].data_ptr()]] if args[0].data_ptr() in self.names else [])
        return output


class CastingGPT(GPT):
    """Notes what its forwards cast."""

    def __init__(self):
        super().__init__()
        self.casts = Kept([])

    def on_train_batch_start(self, batch, batch_idx):
        self.casts.value.append(Casts(list(self.named_parameters())))

    def training_step(self, batch, batch_idx):
        with self.casts.value[-1]:
            return super().training_step(batch, batch_idx)


def cast_weights(**strategy):
    trainer = quiet_trainer(PTDPStrategy(micro_batch_size=1, **strategy), precision="bf16-mixed")
    trainer.fit(module := CastingGPT(), datamodule=ReplicaBatches(BATCHES[:2]))
    owned = {name for name, p in module.named_parameters() if p.dim() == 2 and name.startswith("blocks")}
    return [casts.seen for casts in module.casts.value], owned


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_microbatches_share_the_16_bit_copies_of_autocast(recompute):
    for batches, owned in run_spmd(cast_weights, world_size=2, pipeline_parallel_size=2, recompute=recompute):
        assert len(batches) == 2
        for seen in batches:
            assert seen.keys() >= owned
            assert set(seen.values()) == {1}, seen


class Clamp(Callback):
    """Changes the module's weights, or those that the optimizer holds, as a user's callback may."""

    def __init__(self, how):
        self.how, self.expected = how, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx != 1:
            return
        for parameter in pl_module.parameters():
            if self.how == "data":
                parameter.data.clamp_(-0.01, 0.01)
            elif self.how == "in place":
                with torch.no_grad():
                    parameter.clamp_(-0.01, 0.01)
        with torch.no_grad():
            for weight in trainer.optimizers[0].param_groups[0]["params"] if self.how == "optimizer" else ():
                weight.clamp_(-0.01, 0.01)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            weights = trainer.optimizers[0].param_groups[0]["params"]
            self.largest = max(float(weight.detach().abs().max()) for weight in weights if weight.numel())


class SlowGPT(GPT):
    """Whose weights hardly move."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def edit_weights(sharded):
    """The largest weight after a step that follows a clamp, and what a checkpoint holds of an edit at the end."""
    found = []
    for how in ("data", "in place", "optimizer", "none"):
        seed_everything()
        trainer = quiet_trainer(
            PTDPStrategy(data_parallel_size=2, micro_batch_size=1, distributed_optimizer=sharded),
            callbacks=[clamp := Clamp(how)],
            plugins=[PTDPPrecision("bf16-true"), PoolEnvironment()],
            use_distributed_sampler=False,
        )
        trainer.fit(module := SlowGPT(), datamodule=ReplicaBatches(BATCHES[:2]))
        before = trainer.strategy.whole_state_dict()
        with torch.no_grad():
            module.norm.weight.data[3:5] = 0.5
        after = trainer.strategy.whole_state_dict()
        changed = {name: int((before[name] != after[name]).sum()) for name in after}
        found.append((clamp.largest, sum(changed.values()), after and after["norm.weight"][3:5].tolist()))
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
def test_main_weights_follow_what_is_done_to_the_modules_own(sharded):
    ranks = run_spmd(edit_weights, world_size=2, timeout=60, sharded=sharded)
    for how, seen in zip(("data", "in place", "optimizer", "none"), zip(*ranks, strict=True), strict=True):
        for largest, _, _ in seen:
            assert (largest < 0.011) == (how != "none")
        assert seen[0][1:] == (2, [0.5, 0.5])


class Summing(Callback):
    """Notes the finished gradient of one weight."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        (weight,) = optimizer.param_groups[0]["params"]
        self.seen = [] if weight.grad is None else [(weight.grad.dtype, weight.grad.item())]


class OneWeight(pl.LightningModule):
    """Whose gradients are what it is fed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1, 1, bias=False)])

    def training_step(self, batch, batch_idx):
        return self.blocks[0](batch["x"].to(self.blocks[0].weight.dtype)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gradients_of_256_and_1(precision, **strategy):
    """Of two microbatches, of two batches that accumulate, and of microbatches of two replicas."""
    together, apart = [[256.0, 1.0]], [[256.0, 256.0], [1.0, 1.0]]
    seen = []
    for rows, arguments in ((together, {}), (apart, {"accumulate_grad_batches": 2})):
        trainer = quiet_trainer(
            PTDPStrategy(micro_batch_size=1, **strategy),
            plugins=[PTDPPrecision(precision), PoolEnvironment()],
            callbacks=[summing := Summing()],
            use_distributed_sampler=False,
            **arguments,
        )
        trainer.fit(OneWeight(), datamodule=ReplicaBatches([{"x": torch.tensor(row)[:, None]} for row in rows]))
        seen.append(summing.seen)
    return seen


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_gradients_of_256_and_1_add_to_257(precision):
    """In bfloat16 they would add to 256, and their means to 128."""
    expected = [[(torch.float32, 257.0 / 2)]] * 2
    assert run_spmd(gradients_of_256_and_1, world_size=1, precision=precision) == [expected]
    assert run_spmd(gradients_of_256_and_1, world_size=2, precision=precision) == [expected] * 2
    sharded = run_spmd(gradients_of_256_and_1, world_size=2, precision=precision, distributed_optimizer=True)
    assert [first + second for first, second in zip(*sharded, strict=True)] == expected


class Diverging(GPT):
    """Its gradients become infinite on the last stage in the second batch, in the second microbatch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.count = getattr(self, "count", 0) + 1
        return loss * (torch.inf if self.count == 4 or self.count > 8 else 1.0)


def diverge(**arguments):
    seed_everything()
    precision = arguments.pop("precision", "32-true")
    options = {"initial_scale": 1.0} if precision == "16-mixed" else {}
    trainer = quiet_trainer(
        PTDPStrategy(pipeline_parallel_size=2, micro_batch_size=2, **arguments),
        plugins=[PTDPPrecision(precision, **options), PoolEnvironment()],
        use_distributed_sampler=False,
    )
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(Diverging(), datamodule=ReplicaBatches([texts(4, seed=i) for i in range(30)]))
    return str(caught.value), trainer.global_step


def test_first_gradient_that_is_not_finite_is_named_on_every_rank():
    for text, steps in run_spmd(diverge, detect_nonfinite=True):
        assert "on rank 0 (pipeline rank 1, replica 0, tensor rank 0), stage 1, microbatch 1" in text
        assert "'head.weight'" in text
        assert steps == 1


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_stay_infinite_at_the_lowest_scale_end_the_run():
    for text, steps in run_spmd(diverge, precision="16-mixed", timeout=60):
        assert "at loss scale 1, the lowest: first that of" in text
        assert "stage 1, microbatch 0" in text
        assert steps == 4 + MAX_SKIPPED - 1


def test_precision_that_is_none_is_refused():
    with pytest.raises(ValueError, match="precision must be one of '32-true'"):
        PTDPPrecision("8-true")
