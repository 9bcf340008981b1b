"""What happens while every rank still holds the whole module, or has built it without values."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ptdp.callbacks.summaries import pin_summaries
from lightning_ptdp.comm.groups import Groups
from lightning_ptdp.config import ParallelConfig
from lightning_ptdp.kernels.status import in_a_line
from lightning_ptdp.layout import Layout, describe, layout_of, remember
from lightning_ptdp.preflight.holdings import holdings, table
from lightning_ptdp.preflight.refusals import batch_norm_warning
from lightning_ptdp.preflight.weights import agree_on_weights


def take_leave_of_the_whole(
    trainer: pl.Trainer, module: pl.LightningModule, layout: Layout, config: ParallelConfig, groups: Groups
) -> None:
    """Do what takes the whole module: summarise it, agree on its weights, and say on rank 0 how it will be split.

    Of a module that an earlier run has split, the summary of that time is shown again, and nothing is said.

    Args:
        trainer: of the run.
        module: the user's.
        layout: how it will be split.
        config: the strategy's arguments.
        groups: of this rank.
    """
    is_whole = layout_of(module) is None
    has_summary = pin_summaries(trainer, module, is_whole=is_whole)
    if is_whole:
        agree_on_weights(module, groups)
        remember(module, layout)
        rank_zero_info(f"{describe(layout, config)}; {in_a_line()}")
        if has_summary and layout.topology.replica_size > 1:
            rank_zero_info(table(holdings(module, layout)))
    if trainer.state.fn == TrainerFn.FITTING:
        warning = batch_norm_warning(module, layout.topology, config)
        if warning is not None:
            rank_zero_warn(warning)
