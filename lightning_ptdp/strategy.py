"""`PTDPStrategy`: Lightning's hooks, each a call or two into the engine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_ptdp import loaders
from lightning_ptdp.checkpoint.whole import WholeState
from lightning_ptdp.comm import collectives
from lightning_ptdp.comm.groups import Groups, join_world, world
from lightning_ptdp.config import Auto, ParallelConfig
from lightning_ptdp.engine import Engine
from lightning_ptdp.exchange import Exchange
from lightning_ptdp.failure import FailureBoard
from lightning_ptdp.kernels.status import in_a_line
from lightning_ptdp.layout import (
    Layout,
    Wishes,
    choose_model_parallel,
    describe,
    lay_out,
    layout_of,
    memory_of,
    remember,
)
from lightning_ptdp.logging import ALREADY_SYNCED
from lightning_ptdp.metrics import connect_metrics
from lightning_ptdp.precision import PTDPPrecision
from lightning_ptdp.progress import EvaluationProgress
from lightning_ptdp.schedule import SCHEDULES
from lightning_ptdp.steps import Context, Steps, batch_of
from lightning_ptdp.tensor_parallel.random import mix, share_random_state
from lightning_ptdp.whole_module import agree_on_weights, pin_summaries, refused_callbacks

# What Lightning says when a value is not reduced over ranks; with one replica there is nothing to reduce.
_SYNC_ADVICE = r"It is recommended to use `self\.log\(.*sync_dist=True\)`"
# And when it evaluates with a sampler that repeats samples, which ours does not.
_SAMPLER_ADVICE = r"Using `DistributedSampler` with the dataloaders\."
_CHECKED_BATCHES = 2  # of training, that the ranks of a replica compare


class PTDPStrategy(ParallelStrategy):
    """Trains an ordinary LightningModule under tensor x pipeline x data parallelism (arXiv 2104.04473).

    A run under any sizes gives the numbers of the same run in one process.

    Args:
        tensor_parallel_size: ranks that share each matrix; "auto" lets the strategy choose.
        pipeline_parallel_size: ranks that share the layers; "auto" lets the strategy choose.
        data_parallel_size: replicas; "auto" is what the number of processes leaves.
        virtual_pipeline_size: chunks of layers a pipeline rank holds; above 1 the schedule is interleaved.
        micro_batch_size: samples a microbatch; "auto" is the largest that gives 4 microbatches a pipeline rank.
        eval_micro_batch_size: samples a microbatch in evaluation; None runs each batch whole.
        schedule: "gpipe", "1f1b", "interleaved", or "auto".
        sequence_parallel: split activations between split layers along the sequence, for norms that the plan names.
        tensor_parallel_plan: name patterns to styles; None takes the module's own.
        pipeline_blocks: name of the list of blocks; None finds the `nn.ModuleList` that holds most parameters.
        pipeline_split: blocks of each stage in stage order; None balances by cost, embeddings and head counted.
        first, last, shared: names of modules outside the blocks that run before them, after them, or on every stage,
            where the guess is wrong.
        process_group_backend: of torch.distributed; None takes gloo on CPUs, NCCL with gloo for control on GPUs.
        timeout: of collectives.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning.

    Raises:
        ValueError: at set-up, on every rank, with all faults of the configuration at once.
    """

    def __init__(
        self,
        tensor_parallel_size: int | Auto = "auto",
        pipeline_parallel_size: int | Auto = "auto",
        data_parallel_size: int | Auto = "auto",
        virtual_pipeline_size: int = 1,
        micro_batch_size: int | Auto = "auto",
        eval_micro_batch_size: int | None = None,
        schedule: str = "auto",
        recompute: str = "none",
        sequence_parallel: bool = False,
        distributed_optimizer: bool = False,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        pipeline_blocks: str | None = None,
        pipeline_split: Sequence[int] | None = None,
        first: Sequence[str] = (),
        last: Sequence[str] = (),
        shared: Sequence[str] = (),
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.config = ParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            virtual_pipeline_size=virtual_pipeline_size,
            micro_batch_size=micro_batch_size,
            eval_micro_batch_size=eval_micro_batch_size,
            schedule=schedule,
            sequence_parallel=sequence_parallel,
            pipeline_split=None if pipeline_split is None else tuple(pipeline_split),
        )
        self._wishes = Wishes(tensor_parallel_plan, pipeline_blocks, tuple(first), tuple(last), tuple(shared))
        self.num_nodes = 1
        self._not_available = [
            f"{name}={value!r} is not available in this version; leave it out"
            for name, value, default in (
                ("recompute", recompute, "none"),
                ("distributed_optimizer", distributed_optimizer, False),
            )
            if value != default
        ]
        self._backend, self._timeout = process_group_backend, timeout
        self._faults: list[str] = []
        self._groups: Groups | None = None
        self._engine: Engine | None = None
        self._exchange: Exchange | None = None
        self._steps: Steps | None = None
        self._board: FailureBoard | None = None
        self._progress = EvaluationProgress()
        self._optimizer_names: list[list[list[str]]] = []
        self._blocks_sync = False

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None, "the Trainer's connector sets the devices"
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def groups(self) -> Groups:
        """The process groups of the run."""
        assert self._groups is not None, "groups exist from setup_environment on"
        return self._groups

    @property
    def engine(self) -> Engine:
        """What runs the batches."""
        assert self._engine is not None, "the engine exists from setup on"
        return self._engine

    @property
    def steps(self) -> Steps:
        """What runs the user's steps."""
        assert self._steps is not None, "made at setup"
        return self._steps

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "set by the Trainer"
        return self.lightning_module

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning puts its own sampler into loaders; with one replica, ranks read what the user gave."""
        return self._groups is None or self._groups.topology.data_parallel_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are split over the replicas; ranks of one replica see the same."""
        return {"num_replicas": self.groups.topology.data_parallel_size, "rank": self.groups.at.data}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None, "the Trainer's connector sets the environment"
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment which ranks these are; called by the Trainer's connector."""
        assert self.cluster_environment is not None, "the Trainer's connector sets the environment"
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for marked in (rank_zero_only, fabric_rank_zero_only):
            marked.rank = self.global_rank  # type: ignore[attr-defined]  # Lightning keeps it on the function

    def setup_environment(self) -> None:
        """Join the world, and make the process groups of the layout where the sizes are known already."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._join_world()
        self._faults = [*self.config.faults(SCHEDULES), *self._not_available]
        is_fixed = "auto" not in (self.config.tensor_parallel_size, self.config.pipeline_parallel_size)
        if is_fixed or any(True for _ in self._module.parameters()):
            self._make_groups()

    def _make_groups(self) -> None:
        """Choose what was left to "auto", and make the groups; faults are kept for `setup`, which raises them all."""
        if self._faults:
            return
        topology, self._faults = self.config.resolve(self.world_size, self._choice())
        if self._faults or (self._groups is not None and self._groups.topology == topology):
            return
        self._groups = Groups.create(topology, self.root_device.type)
        self._exchange = Exchange(self._groups)
        assert self.cluster_environment is not None, "set by the connector"
        host = self.cluster_environment.main_address
        self._board = FailureBoard(topology, self.global_rank, host, self._groups.world)

    def _choice(self) -> tuple[int, int]:
        known = layout_of(self._module)
        if known is not None:
            return known.topology.tensor_parallel_size, known.topology.pipeline_parallel_size
        return choose_model_parallel(
            self._module,
            self.config,
            self._wishes,
            world_size=self.world_size,
            devices_per_node=self.num_processes,
            device_bytes=memory_of(self.root_device, self.num_processes),
        )

    def _join_world(self) -> None:
        assert self.cluster_environment is not None, "set by the connector"
        backend = self._backend or ("cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo")
        if self.root_device.type == "cuda" and "gloo" not in backend:
            backend = f"cpu:gloo,cuda:{backend}"  # small control messages stay on the host
        environment = self.cluster_environment
        join_world(
            backend,
            address=environment.main_address,
            port=environment.main_port,
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
        )

    # -- set-up ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Split the module, configure its optimizers, and connect everything that needs to know."""
        assert self.accelerator is not None, "set by the Trainer"
        module, fits = self._module, trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        layout = self._check(trainer, module)
        if self._board is not None:
            self._board.__enter__()
        if layout_of(module) is None:
            pin_summaries(trainer, module)
            agree_on_weights(module, self.groups)
            remember(module, layout)
            rank_zero_info(f"{describe(layout, self.config)}; {in_a_line()}")
        self.precision.convert_module(module)
        self._engine = Engine(self.config, self.groups, self.root_device, self._agreed_seed())
        self._engine.set_up(module, layout.partition, layout.placement)
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision.bind(self._gradient_norm)
        assert self._exchange is not None, "made with the groups"
        self._steps = Steps(module, self._engine, self._exchange, self._board)
        warnings.filterwarnings("ignore", message=_SAMPLER_ADVICE)
        if not self.is_distributed:
            warnings.filterwarnings("ignore", message=_SYNC_ADVICE)
        connect_metrics(module, self.groups, lambda: self.steps.is_in_step, self.root_device)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connector
        if self._progress not in callbacks:
            callbacks.append(self._progress)
        share_random_state(self.root_device, self.groups.world)

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule) -> Layout:
        """The layout of the module; raises on every rank with all that is wrong, before the first collective on it."""
        if self._groups is None:
            self._make_groups()
        faults = list(self._faults)
        topology = self._groups.topology if self._groups is not None else None
        if topology is None:
            topology, more = self.config.resolve(self.world_size)
            faults += [fault for fault in more if fault not in faults]
        layout, more = lay_out(module, self.config, topology, self._wishes)
        faults += more + refused_callbacks(trainer, topology)
        if topology.pipeline_parallel_size > 1 and not module.automatic_optimization:
            faults.append(
                "manual optimization runs backward inside training_step, where only the last stage arrives; use "
                "automatic optimization, or pipeline_parallel_size=1"
            )
        if faults:
            raise ValueError("PTDPStrategy cannot run this:\n" + "\n".join(f"- {fault}" for fault in faults))
        return layout

    def _agreed_seed(self) -> int:
        seed: int = collectives.broadcast_object(torch.initial_seed(), 0, self.groups.world)
        return seed

    def model_to_device(self) -> None:
        """Move what this rank owns."""
        self._module.to(self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Configure the optimizers on the whole tree, then leave them what this rank owns."""
        module, skeleton = self._module, self.engine.skeleton
        with skeleton.whole() if skeleton is not None else nullcontext():
            super().setup_optimizers(trainer)
            names = {parameter: name for name, parameter in reversed(list(module.named_parameters()))}
            self._optimizer_names = [
                [[names[p] for p in group["params"]] for group in optimizer.param_groups]
                for optimizer in self.optimizers
            ]
        hollow = skeleton.hollow.parameters if skeleton is not None else set()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p not in hollow]
            for parameter in hollow & optimizer.state.keys():
                del optimizer.state[parameter]
        if module.automatic_optimization:
            self._bind()
        else:
            self.engine.sum_in_backward(module)

    def _trained(self) -> list[nn.Parameter]:
        members = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        return list(dict.fromkeys(members))

    def _bind(self) -> None:
        self.engine.bind(self._module, self._trained())

    @property
    def precision(self) -> PTDPPrecision:
        """The precision plug-in."""
        plugin = self.precision_plugin
        assert isinstance(plugin, PTDPPrecision), "the setter converts others"
        return plugin

    @property
    def precision_plugin(self) -> Precision:
        """The precision plug-in; Lightning's own are replaced by their counterparts that see every rank."""
        return self._precision_plugin if self._precision_plugin is not None else PTDPPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else PTDPPrecision.of(plugin)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are built on the host, so that a device holds only what its rank owns."""
        with self.precision.tensor_init_context():
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """Evaluate each sample once, seed workers by replica, and end on all replicas at once."""
        trainer = self._module.trainer
        evaluates = trainer.validating or trainer.testing or trainer.sanity_checking
        return loaders.prepare(dataloader, self.groups, evaluates=evaluates, warn=rank_zero_warn)

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch through the schedule; gradients wait for `backward`."""
        module = self._module
        if not module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        if not self.engine.trains(self._trained()):
            self._bind()
        loop, accumulate = module.trainer.fit_loop, module.trainer.accumulate_grad_batches
        if loop.total_batch_idx < _CHECKED_BATCHES:
            self.steps.check_same(batch_of(args, kwargs))
        return self.steps.train(
            self.precision.train_step_context,
            lambda loss: self.precision.backward(loss, module, None),
            args,
            kwargs,
            number=loop.total_batch_idx,
            accumulate=accumulate,
            is_first=loop.batch_idx % accumulate == 0,
            is_last=not self._blocks_sync,
            loss_dtype=self.precision.loss_dtype,
        )

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients that the schedule left, once the window is complete."""
        module = self._module
        if not module.automatic_optimization:
            return self._manual_backward(closure_loss, optimizer, *args, **kwargs)
        closure_loss = self.precision.pre_backward(closure_loss, module)
        if not self._blocks_sync:
            self.engine.reduce_gradients()
        return self.precision.post_backward(closure_loss, module)

    def _manual_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Manual optimization, without a pipeline: average over the replicas what one backward gave."""
        loss = super().backward(loss, optimizer, *args, **kwargs)
        collectives.average_gradients(self._module.parameters(), self.groups.data)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within, a batch is one of several that accumulate, and not the last."""
        self._blocks_sync = True
        try:
            yield
        finally:
            self._blocks_sync = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch."""
        return self._evaluate("validation_step", self.precision.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch."""
        return self._evaluate("test_step", self.precision.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch."""
        return self._evaluate("predict_step", self.precision.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Context, args: Any, kwargs: Any) -> Any:
        at = self._progress
        if at.batch_idx == 0:
            self.steps.check_same(batch_of(args, kwargs))
        return self.steps.evaluate(
            getattr(self._module, name),
            context,
            args,
            kwargs,
            number=mix(self._module.trainer.global_step, at.dataloader_idx, at.batch_idx),
            size=self.config.eval_micro_batch_size,
            counts=not at.is_ghost,
            joins_replicas=name != "predict_step",
        )

    def _gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        return self.engine.gradient_norm(self._module, parameters)

    # -- collectives of Lightning ------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for the whole world."""
        if dist.is_initialized():
            collectives.barrier(world())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of global rank `src` on the whole world."""
        return collectives.broadcast_object(obj, src, world()) if dist.is_initialized() else obj

    def reduce(
        self, tensor: Tensor | Any, group: ProcessGroup | str | None = None, reduce_op: Any = "mean"
    ) -> Tensor | Any:
        """Reduce over the replicas: the ranks of one replica hold the same value, and it must count once.

        A value that was merged over the replicas when its step ended is returned as it is.
        """
        if not isinstance(tensor, Tensor) or group == ALREADY_SYNCED:
            return tensor
        chosen = self.groups.data if group is None or isinstance(group, str) else group
        return collectives.reduce_by_name(tensor, chosen, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One decision for the whole world."""
        vote = torch.tensor(int(decision))
        return bool(collectives.all_reduce_(vote, world(), collectives.MIN if all else collectives.MAX))

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the replicas."""
        return super().all_gather(tensor, group=group or self.groups.data, sync_grads=sync_grads)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True

    def _whole_state(self) -> WholeState:
        return WholeState(self.groups, self.engine.state_names(self._module), self.engine.placement.shards)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain module's state on global rank 0, empty elsewhere; every rank must call this."""
        self._refuse_after_failure()
        return self._whole_state().gather_module(self._module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a plain module's state."""
        whole, given = self._whole_state(), checkpoint["state_dict"]
        if strict:
            whole.check_names(given)
        mine = whole.cut_module(given, list(self._module.state_dict()))
        self._module.load_state_dict(mine, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """A plain optimizer's state on global rank 0, without values elsewhere; every rank must call this."""
        self._refuse_after_failure()
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        names = self._optimizer_names[self.optimizers.index(plain)]
        return self._whole_state().gather_optimizer(plain, names, self.engine.plain_names(self._module))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of plain optimizers' states."""
        whole, name_of = self._whole_state(), self.engine.plain_names(self._module)
        states = checkpoint["optimizer_states"]
        for optimizer, names, given in zip(self.optimizers, self._optimizer_names, states, strict=True):
            optimizer.load_state_dict(whole.cut_optimizer(optimizer, names, name_of, given))

    def _refuse_after_failure(self) -> None:
        if self._module.trainer.interrupted:
            if self._board is not None:  # a callback that saves now ends the Trainer before it tells the strategy
                failure = sys.exc_info()[1]
                if failure is not None:
                    self._board.report(failure)
                self._board.__exit__()
            raise RuntimeError(
                "no checkpoint can be saved after a failure: it takes every rank, and one has failed; the last "
                "checkpoint saved before is whole"
            )

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Post the failure for the other ranks, or say in it what failed first."""
        if self._board is not None:
            self._board.report(exception)

    def teardown(self) -> None:
        """Stop watching, and give the module its own `log` back."""
        if self._board is not None:
            self._board.__exit__()
        if self._steps is not None:
            self._steps.close()
        if self._engine is not None:
            self._engine.release()
        super().teardown()


StrategyRegistry.register(
    "ptdp", PTDPStrategy, description="Tensor x pipeline x data parallelism for ordinary LightningModules (PTD-P)"
)
