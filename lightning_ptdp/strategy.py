"""`PTDPStrategy`: Lightning's hooks, each a call or two into the engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ptdp.callbacks.averages import split_averages
from lightning_ptdp.callbacks.loop_progress import LoopProgress
from lightning_ptdp.callbacks.resuming import KEY, Resuming
from lightning_ptdp.callbacks.stage_state import StageState
from lightning_ptdp.callbacks.stop_together import StopTogether
from lightning_ptdp.callbacks.users import (
    count_replicas,
    release,
    show_whole_model,
    tell_restored,
)
from lightning_ptdp.checkpoint.checkpoints import Checkpoints, is_users
from lightning_ptdp.comm import collectives
from lightning_ptdp.comm.failure import FailureBoard
from lightning_ptdp.comm.groups import Groups, backend_for, join_world, world
from lightning_ptdp.config import Auto, ParallelConfig
from lightning_ptdp.data_parallel.scaling import GradientSample, check_scaled_alike
from lightning_ptdp.deferred_init import DeferredInit
from lightning_ptdp.engine.batch_run import Window
from lightning_ptdp.engine.engine import Engine
from lightning_ptdp.host.lightning import (
    SubprocessScriptLauncher,
    callbacks_of,
    silence_advice,
    splits_samplers,
    syncs_batch_norms,
)
from lightning_ptdp.layout import (
    Layout,
    layout_of,
    memory_of,
)
from lightning_ptdp.loaders import replicas
from lightning_ptdp.loaders.predictions import join_predictions
from lightning_ptdp.precision.held_rates import hold
from lightning_ptdp.precision.plugin import PTDPPrecision
from lightning_ptdp.preflight.settle import Asked, Machine, Sizes, settle_layout, settle_optimizers, settle_sizes
from lightning_ptdp.preflight.whole import take_leave_of_the_whole
from lightning_ptdp.random_streams import align_random_state, mix
from lightning_ptdp.run import Run, make_run
from lightning_ptdp.steps.log_calls import ALREADY_SYNCED
from lightning_ptdp.steps.metrics import connect_metrics
from lightning_ptdp.steps.steps import Context, Steps, batch_of, edits_gradients
from lightning_ptdp.topology import Topology

log = logging.getLogger(__name__)

# The ranks of a replica compare so many batches at the beginning of a run and of each epoch of training.
_CHECKED_BATCHES = 2


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
        recompute: what backward runs again instead of keeping it: "none", "full" for whole blocks, "selective" for
            attention scores and what follows them up to the product with the values.
        recompute_every: blocks of which "full" keeps one input.
        recompute_layers: blocks of each stage that recompute, its first ones: one number for every stage, or p * v
            numbers in stage order; None for all.
        recompute_modules: name patterns of modules in the blocks that "selective" runs again; empty takes those called
            `core_attention`, and elsewhere finds the scores.
        sequence_parallel: split activations between split layers along the sequence, for norms that the plan names.
        scatter_gather: whether tensor peers send what they hold alike in parts from stage to stage; sequence_parallel
            leaves it off, as activations are in parts already.
        tensor_parallel_plan: name patterns to styles; None takes the module's own.
        pipeline_blocks: name of the list of blocks; None finds the `nn.ModuleList` that holds most parameters.
        pipeline_split: blocks of each stage in stage order; None balances by cost, embeddings and head counted.
        first, last, shared: names of modules outside the blocks that run before them, after them, or on every stage,
            where the guess is wrong.
        distributed_optimizer: whether replicas share out main weights and optimizer states (ZeRO-1).
        init: "plain" builds the whole module on every host, with the weights of one process; "by_operation" computes of
            what `configure_model` builds only what a rank owns, with weights that are the same under every layout.
        save_distributed_checkpoint: True saves a folder that all ranks write, False one ordinary file.
        detect_nonfinite: whether the first gradient that is infinite or NaN ends the run, with the names of parameter,
            stage and microbatch; costs a pass over gradients a microbatch. A loss scale decides by itself.
        async_checkpoint: whether training goes on while a folder is written, once its tensors are copied.
        save_on_signal: signals to any one rank on which all save a checkpoint and stop after the step; True is SIGTERM.
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
        recompute_every: int = 1,
        recompute_layers: int | Sequence[int] | None = None,
        recompute_modules: Sequence[str] = (),
        sequence_parallel: bool = False,
        scatter_gather: bool = True,
        distributed_optimizer: bool = False,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        pipeline_blocks: str | None = None,
        pipeline_split: Sequence[int] | None = None,
        first: Sequence[str] = (),
        last: Sequence[str] = (),
        shared: Sequence[str] = (),
        init: str = "plain",
        save_distributed_checkpoint: bool = True,
        async_checkpoint: bool = False,
        detect_nonfinite: bool = False,
        save_on_signal: bool | Sequence[int] = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.config = ParallelConfig.among(locals())
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self._checkpoints: Checkpoints | None = None
        self._deferred: DeferredInit | None = None
        self._sizes: Sizes | None = None
        self._groups: Groups | None = None
        self._run: Run | None = None
        self._board: FailureBoard | None = None
        self._progress, self._stop_together = LoopProgress(), StopTogether(self.config.signals)
        self._predicts = False
        self._loading: RemovableHandle | None = None
        self._blocks_sync = False
        self._unchecked = 0
        self._watches_edits = False
        self._sample: GradientSample | None = None

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device on which this rank computes."""
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
        """The engine, which runs batches through the module."""
        return self._set_up.engine

    @property
    def steps(self) -> Steps:
        """The object that runs the user's steps."""
        return self._set_up.steps

    @property
    def resuming(self) -> Resuming:
        """The callback that saves and restores random generators and the positions of loaders."""
        return self._set_up.resuming

    @property
    def _set_up(self) -> Run:
        assert self._run is not None, "made at setup"
        return self._run

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "set by the Trainer"
        return self.lightning_module

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning puts its own sampler into loaders.

        With one replica, ranks read what the user gave. For prediction each batch goes to one replica (`loaders`), and
        Lightning's sampler would fail for fewer samples than replicas.
        """
        return not self._predicts and (self._groups is None or self._groups.topology.data_parallel_size > 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's sampler, which splits samples over the replicas; a replica's ranks read the same."""
        return {"num_replicas": self.groups.topology.data_parallel_size, "rank": self.groups.at.data}

    def _configure_launcher(self) -> None:
        """Choose a launcher that starts the processes, unless a scheduler has started them.

        A single process needs no launcher, and so can run in a notebook.

        Raises:
            ValueError: a scheduler has started another number of processes than the Trainer was told.
        """
        environment = self.cluster_environment
        assert environment is not None, "the Trainer's connector sets the environment"
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally and self.num_processes * self.num_nodes > 1:
            self._launcher = SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

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
        self._settle_sizes(is_built=any(True for _ in self._module.parameters()))
        if self.config.init == "by_operation" and layout_of(self._module) is None:
            self._deferred = DeferredInit(self._module, self._agreed_seed())

    def _settle_sizes(self, *, is_built: bool) -> Sizes:
        """Agree with the other ranks on sizes, and make the groups if these are known.

        Args:
            is_built: whether the module has its layers already.
        """
        module, device = self._module, self.root_device
        machine = Machine(world(), device.type, self.num_processes, memory_of(device, self.num_processes))
        sizes = settle_sizes(module.trainer, module, self._asked(), machine, is_built=is_built)
        if not sizes.findings.are_alike:  # hooks before `setup` may meet in collectives, and would wait for ever
            if is_built:
                settle_layout(module.trainer, module, self._asked(), sizes, self._deferred, world())
            sizes.findings.refuse()
        if sizes.topology is not None and not sizes.findings.faults:
            self._make_groups(sizes.topology)
        self._sizes = sizes
        return sizes

    def _asked(self) -> Asked:
        return Asked(self.config, is_users(self.checkpoint_io), self.precision.has_main_weights)

    def _make_groups(self, topology: Topology) -> None:
        if self._groups is not None and self._groups.topology == topology:
            return
        self._groups = Groups.create(topology, self.root_device.type)
        assert self.cluster_environment is not None, "set by the connector"
        host = self.cluster_environment.main_address
        self._board = FailureBoard(topology, self.global_rank, host, self._groups.world)

    def _join_world(self) -> None:
        assert self.cluster_environment is not None, "set by the connector"
        environment = self.cluster_environment
        join_world(
            backend_for(self.root_device, self.config.process_group_backend),
            address=environment.main_address,
            port=environment.main_port,
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self.config.timeout,
        )

    # -- set-up ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Split the module, configure its optimizers, and connect everything that needs to know."""
        assert self.accelerator is not None, "set by the Trainer"
        module, fits = self._module, trainer.state.fn == TrainerFn.FITTING
        self._predicts = trainer.state.fn == TrainerFn.PREDICTING
        self.accelerator.setup(trainer)
        layout = self._settle_layout(trainer)
        if self._board is not None:
            self._board.__enter__()
        take_leave_of_the_whole(trainer, module, layout, self.config, self.groups)
        with self._recording():
            self.precision.convert_module(module)
        self._run = make_run(
            trainer,
            module,
            layout,
            self.config,
            self.groups,
            self.root_device,
            seed=self._agreed_seed(),
            board=self._board,
            progress=self._progress,
            deferred=self._deferred,
            former=None if fits else self._run,
        )
        self._deferred = None
        if fits:
            self.engine.join_statistics(module, all_batch_norms=syncs_batch_norms(self))
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._unchecked = _CHECKED_BATCHES
        self.precision.bind(self.engine.gradients.norm, self._after_hooks)
        self.precision.keeps_copies = module.automatic_optimization
        self._watches_edits = self.groups.replica.size() > 1 and edits_gradients(trainer, module)
        silence_advice(has_replicas=self.groups.topology.data_parallel_size > 1)
        connect_metrics(module, self.groups, lambda: self.steps.is_in_step, self.root_device)
        self._connect_callbacks(trainer)
        align_random_state(self.root_device, self.groups.world)
        self.resuming.is_set_up = True

    def _connect_callbacks(self, trainer: pl.Trainer) -> None:
        callbacks, topology = callbacks_of(trainer), self.groups.topology
        ours = (LoopProgress, Resuming, StageState, StopTogether)
        users = [callback for callback in callbacks if not isinstance(callback, ours)]
        state = [StageState(self.groups, self.root_device)] if topology.pipeline_parallel_size > 1 else []
        callbacks[:] = [*state, self._progress, self.resuming, *users, self._stop_together]
        self._stop_together.watch()
        self.steps.listen(users)
        show_whole_model(callbacks, self.whole_model)
        count_replicas(callbacks, topology, self.root_device, str(self.precision.precision))
        if topology.replica_size > 1:
            self._loading = split_averages(callbacks, self._module, self._set_up.state.local(), self.groups)

    def _settle_layout(self, trainer: pl.Trainer) -> Layout:
        """Work out the layout of the module, alike on all ranks.

        Raises:
            ValueError: on every rank, with all that is wrong, before the first collective on the module.
        """
        sizes = self._sizes
        if sizes is None or (sizes.topology is None and not sizes.findings.faults):  # alike on all ranks
            sizes = self._settle_sizes(is_built=True)
        return settle_layout(trainer, self._module, self._asked(), sizes, self._deferred, world())

    def _agreed_seed(self) -> int:
        seed: int = collectives.broadcast_object(torch.initial_seed(), 0, world())
        return seed

    def model_to_device(self) -> None:
        """Move what this rank owns to its device."""
        self._module.to(self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Configure the optimizers on the whole model's parameters, then leave them those that this rank owns."""
        groups = self._set_up.whole_groups
        with self.engine.parameters.whole():
            super().setup_optimizers(trainer)
            settle_optimizers(
                self._module,
                self.optimizers,
                self.lr_scheduler_configs,
                self.groups.topology,
                self.groups.world,
                shards=self.config.distributed_optimizer,
            )
        groups.hide(self.optimizers)
        if self.precision.loss_scale is not None:
            for config in self.lr_scheduler_configs:
                if config.interval == "step":
                    hold(config.scheduler, lambda: self.precision.was_skipped)
        if self._module.automatic_optimization:
            groups.bind(self.optimizers)
        else:
            self.engine.gradients.bind_manual()

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """Let the module and the optimizers list the whole model's parameters within the context, as in one process.

        It is meant for code outside steps that freezes modules or adds parameter groups, and must run on every rank.
        The values of what other ranks own are NaN.
        """
        with self._set_up.whole_groups.shown(self.optimizers):
            yield

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
        """Build modules on the host, so that a device holds only what its rank owns; or without values."""
        with self._recording(), self.precision.tensor_init_context():
            yield

    def _recording(self) -> AbstractContextManager[None]:
        return nullcontext() if self._deferred is None else self._deferred.recording()

    def process_dataloader(self, dataloader: object) -> object:
        """Adapt a loader to the replicas: each sample once, workers seeded by replica, equal ends."""
        trainer = self._module.trainer
        assert trainer.state.stage is not None, "loaders are read in a stage"
        splits_samples = splits_samplers(trainer)
        return replicas.prepare(
            dataloader,
            self.groups,
            stage=trainer.state.stage,
            splits_samples=splits_samples,
            warn=rank_zero_warn,
            resumable=lambda loader: self.resuming.resumable(loader, rank_zero_warn),
        )

    def on_train_start(self) -> None:
        """Put the random generators where a checkpoint left them; runs after all other hooks of this name."""
        self.resuming.restore()

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch through the schedule; gradients wait for `backward`."""
        module, context = self._module, self.precision.train_step_context
        loop, accumulate = module.trainer.fit_loop, module.trainer.accumulate_grad_batches
        if loop.batch_idx < _CHECKED_BATCHES or self._unchecked > 0:
            self._unchecked -= 1
            self.steps.check_same(batch_of(args, kwargs))
        if not module.automatic_optimization:
            output = self.steps.train_manually(context, args, kwargs, number=loop.total_batch_idx)
            self._remark_on_recomputation()
            return output
        window = Window(
            number=loop.total_batch_idx,
            accumulate=accumulate,
            is_first=loop.batch_idx % accumulate == 0,
            is_last=not self._blocks_sync,
        )
        gradients = self.engine.gradients
        self.engine.agree(self._set_up.whole_groups.keep_up(self.optimizers, is_first=window.is_first))
        watches = self.config.detect_nonfinite if self.precision.loss_scale is None else self.precision.is_in_trouble
        if watches:
            gradients.watch(self.engine.where)
        output = self.steps.train(args, kwargs, window, self.precision)
        self._remark_on_recomputation()
        if watches:
            gradients.refuse_nonfinite(None if self.precision.loss_scale is None else self.precision.scale)
        if output is None and window.is_last:  # a skipped batch has no backward, and may end a window
            gradients.reduce()
        return output

    def _remark_on_recomputation(self) -> None:
        remark = self.engine.remark_on_recomputation()
        if remark is not None:
            rank_zero_info(remark)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Publish the gradients that the schedule left, once the accumulation window is complete."""
        module = self._module
        if not module.automatic_optimization:
            return self._manual_backward(closure_loss, optimizer, *args, **kwargs)
        closure_loss = self.precision.pre_backward(closure_loss, module)
        if not self._blocks_sync:
            self.engine.gradients.reduce()
            if self.precision.loss_scale is not None:
                self.precision.take_gradients(are_finite=self.engine.gradients.are_finite())
            self._sample = GradientSample(self._stepped()) if self._watches_edits else None
        return self.precision.post_backward(closure_loss, module)

    def _manual_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward of manual optimization, and average over the replicas what it gave; without a pipeline."""
        loss = super().backward(loss, optimizer, *args, **kwargs)
        if self.engine.gradients.manual is not None and not self._blocks_sync:
            self.engine.gradients.manual.settle()
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Step, and bring the module's parameters up to date with what was stepped.

        Raises:
            RuntimeError: gradients of manual optimization are not those of all replicas.
        """
        manual = self.engine.gradients.manual

        def checked() -> Any:
            result = closure()
            if manual is not None:
                manual.check(p for group in optimizer.param_groups for p in group["params"])
            return result

        result = super().optimizer_step(optimizer, checked, model, **kwargs)
        self.engine.gradients.refresh_weights()
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Take a batch (in manual optimization a backward) for one of several that accumulate, and not the last."""
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

    def on_predict_end(self) -> None:
        """Give the ranks of replica 0 all predictions, where they are returned."""
        loop = self._module.trainer.predict_loop
        if loop.return_predictions:
            predictions = [loop.predictions] if loop.num_dataloaders == 1 else loop.predictions
            join_predictions(predictions, replicas.leaves(self._module.trainer.predict_dataloaders), self.groups)

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

    def gradient_norm(self) -> Tensor:
        """Compute the norm of the finished gradients over the whole model, for hooks before a step.

        Every rank must call it.
        """
        return self.engine.gradients.norm(self._stepped())

    def _stepped(self) -> list[nn.Parameter]:
        """What the optimizers step on this rank."""
        return self._set_up.whole_groups.stepped(self.optimizers)

    def _after_hooks(self) -> None:
        """Take in what hooks did to gradients, and refuse it if the ranks of one model scaled theirs differently."""
        self.engine.gradients.take_edits()
        if self._sample is not None:
            check_scaled_alike(self._sample, self.groups.replica, self.groups.topology.replica_ranks(self.groups.at))
            self._sample = None

    # -- collectives of Lightning ------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here."""
        if dist.is_initialized():
            collectives.barrier(world())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object of global rank `src` to all ranks, and return it."""
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
        """Make one decision of those of all ranks: whether all, or any, say yes."""
        vote = torch.tensor(int(decision))
        return bool(collectives.all_reduce_(vote, world(), collectives.MIN if all else collectives.MAX))

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor over the replicas, or over a group that the user gives.

        Args:
            tensor: of one shape everywhere.
            group: the ranks. Lightning passes the world if the user passed nothing, and both mean the replicas.
            sync_grads: whether gradients flow back, summed over the ranks.

        Returns:
            [d, ...], the tensors of all replicas.
        """
        chosen = self.groups.data if group in (None, dist.group.WORLD) else group
        with nullcontext() if sync_grads else torch.no_grad():
            return collectives.gather_to(tensor[None], chosen, 0)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    restore_checkpoint_after_setup = True

    @property
    def checkpoints(self) -> Checkpoints:
        """The object that saves and loads checkpoints."""
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self.groups)
        return self._checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The part of the plain module's state that this rank holds, under its names; every rank must save it."""
        self._refuse_after_failure()
        return self._set_up.state.held()

    def whole_state_dict(self) -> dict[str, Any]:
        """The plain module's state in the memory of global rank 0, empty elsewhere; every rank must call this."""
        return self._set_up.state.whole()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The part of a plain optimizer's state that this rank holds, by parameters' names; every rank must save it."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        names = self._set_up.whole_groups.names(self.optimizers, self._module)
        return self._set_up.state.of_optimizer(plain, names[self.optimizers.index(plain)])

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save a folder that all ranks write, or one file; every rank must call this.

        Raises:
            RuntimeError: on every rank, when one failed.
        """
        if storage_options is not None:
            raise TypeError(
                "PTDPStrategy saves through its own store, which takes no storage_options; leave them out, or write "
                "them into a CheckpointIO given by plugins= with save_distributed_checkpoint=False"
            )
        path = str(self.broadcast(str(filepath)))
        if "optimizer_states" in checkpoint:
            checkpoint[KEY] = self.resuming.state(self.engine.streams.seed)
        is_running = self._module.trainer.state.status == TrainerStatus.RUNNING  # else nobody would wait for it later
        self.checkpoints.save(
            path,
            checkpoint,
            self._set_up.state,
            self.checkpoint_io,
            is_folder=self.config.save_distributed_checkpoint,
            in_background=self.config.async_checkpoint and is_running,
        )

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint that was saved under any layout, or without this strategy.

        Of a folder a rank reads only what it holds. A folder of safetensors has no more than the weights of the
        module's Hugging Face model, with which a run can start.
        """
        path, state = str(self.broadcast(str(checkpoint_path))), self._set_up.state
        if self.checkpoints.is_pretrained(path):
            states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
            return self.checkpoints.load_pretrained(path, self._module, state, states)
        loaded = self.checkpoints.load(
            path, state, self.checkpoint_io, num_optimizers=len(self.optimizers), weights_only=weights_only
        )
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self.engine.streams.seed = self.resuming.take(loaded.get(KEY), self.engine.streams.seed)
        return loaded

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint, once a save that is under way has ended."""
        self.checkpoints.remove(Path(filepath), self.checkpoint_io)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the plain module's state.

        Raises:
            RuntimeError: on every rank, if names are missing or unknown and strict.
        """
        self._set_up.state.load_module(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of plain optimizers' states."""
        tell_restored(self._module.trainer, self._module, self.whole_model)
        names = self._set_up.whole_groups.names(self.optimizers, self._module)
        self._set_up.state.load_optimizers(checkpoint["optimizer_states"], self.optimizers, names)

    def _refuse_after_failure(self) -> None:
        if isinstance(sys.exc_info()[1], SIGTERMException):  # raised on all ranks at once
            return
        if self._module.trainer.interrupted and self.world_size > 1:
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
        if self._board is not None and not isinstance(exception, SIGTERMException):  # that comes to all ranks at once
            self._board.report(exception)

    def teardown(self) -> None:
        """Stop watching, and give the module its own `log` back."""
        if self._checkpoints is not None:
            checkpoints, self._checkpoints = self._checkpoints, None
            checkpoints.close(has_failed=self._module.trainer.interrupted)
        if self._board is not None:
            self._board.__exit__()
        if self._run is not None:
            self._run.steps.close()
        if self._loading is not None:
            self._loading.remove()
        if self.lightning_module is not None:
            release(callbacks_of(self._module.trainer))
        if self._run is not None:
            self._run.engine.close()
        if self._deferred is not None:  # set-up failed; Lightning moves the module to the host, which needs values
            self._deferred.abandon(self._module)
            self._deferred = None
        super().teardown()


StrategyRegistry.register(
    "ptdp", PTDPStrategy, description="Tensor x pipeline x data parallelism for ordinary LightningModules (PTD-P)"
)
