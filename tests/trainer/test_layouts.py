"""The same run under every layout gives the numbers of one process: losses, gradients and weights.

One row a claim. A new feature adds rows, and where it needs it a column.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.models import GPT, PairNet, TableNet, points, texts
from tests.oracle import assert_same, join, parallel, serial, train
from tests.spmd import run_spmd

DEFAULT_SIZES = (4, 4, 4)


@dataclass(frozen=True)
class Layout:
    """A run and how it is split.

    t, p, v, d: sizes. b: samples a microbatch. sizes: rows of each global batch.
    model, options, make_batch: what is trained, and on what. strategy, trainer: further arguments.
    """

    t: int = 1
    p: int = 1
    v: int = 1
    d: int = 1
    b: Any = 1
    schedule: str = "auto"
    sizes: tuple[int, ...] = DEFAULT_SIZES
    model: Any = GPT
    options: dict[str, Any] = field(default_factory=dict)
    make_batch: Any = texts
    strategy: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: str = "norm"


# How GPT is split over tensor peers.
PLAN = {
    "token": "embedding_rowwise",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.project": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}

LAYOUTS = {
    "one process": Layout(),
    "one process, batch whole": Layout(b=4),
    "pipeline": Layout(p=2),
    "pipeline, batch whole": Layout(p=2, b=4),
    "pipeline of four": Layout(p=4),
    "gpipe": Layout(p=2, schedule="gpipe"),
    "interleaved": Layout(p=2, v=2),
    "interleaved, three microbatches": Layout(p=2, v=2, sizes=(3, 3)),
    "interleaved, breadth first": Layout(p=2, v=2, schedule="gpipe"),
    "replicas": Layout(d=2),
    "replicas, batches whole": Layout(d=2, b=4),
    "pipeline and replicas": Layout(p=2, d=2),
    "interleaved and replicas": Layout(p=2, v=2, d=2),
    "automatic microbatches": Layout(p=2, b="auto", sizes=(16, 20)),
    "microbatches that do not divide": Layout(p=2, b=3, sizes=(8, 8)),
    "partial last batch": Layout(p=2, d=2, sizes=(4, 4, 2)),
    "replicas of unequal batches": Layout(p=2, d=2, sizes=(5, 3)),
    "tied": Layout(p=2, options={"tied": True}),
    "tied, replicas": Layout(p=2, d=2, options={"tied": True}),
    "tied, interleaved": Layout(p=2, v=2, options={"tied": True}),
    "tied, pipeline of four": Layout(p=4, options={"tied": True}, clip=0.5),
    "padded": Layout(p=2, d=2, make_batch=partial(texts, padded=True)),
    "accumulated": Layout(p=2, accumulate=2, sizes=(4, 4, 4, 4)),
    "accumulated, partial window": Layout(p=2, d=2, accumulate=2, sizes=(4, 4, 4)),
    "accumulated, padded": Layout(p=2, d=2, accumulate=2, sizes=(4, 4), make_batch=partial(texts, padded=True)),
    "clipped by norm": Layout(p=2, d=2, clip=0.1),
    "clipped by norm, tied": Layout(p=2, d=2, clip=0.1, options={"tied": True}),
    "clipped by value": Layout(p=2, clip=0.01, clip_algorithm="value"),
    "momentum": Layout(p=2, d=2, options={"optimizer": "momentum"}),
    "AdamW": Layout(p=2, d=2, options={"optimizer": "adamw", "lr": 0.01}),
    "AdamW, tied": Layout(p=2, options={"optimizer": "adamw", "lr": 0.01, "tied": True}),
    "Adagrad": Layout(p=2, options={"optimizer": "adagrad"}),
    "tensor peers": Layout(t=2),
    "tensor peers, tied, uneven vocabulary": Layout(
        t=2, options={"tied": True, "vocabulary": 61}, make_batch=partial(texts, vocabulary=61), clip=0.1
    ),
    "tensor peers and pipeline": Layout(t=2, p=2, options={"tied": True}, make_batch=partial(texts, padded=True)),
    "tensor peers and replicas": Layout(t=2, d=2, options={"optimizer": "adamw", "lr": 0.01}, clip=0.1),
    "tensor peers, batch whole": Layout(t=2, b=4),
    "tensor peers, padded": Layout(t=2, make_batch=partial(texts, padded=True), b=2),
    "tensor peers, accumulated": Layout(t=2, accumulate=2, sizes=(4, 4, 4), clip=0.1),
    "tensor peers, clipped by value": Layout(t=2, clip=0.01, clip_algorithm="value"),
    "tensor peers, interleaved": Layout(t=2, p=2, v=2, options={"tied": True}, clip=0.1),
    "tensor peers and pipeline, uneven vocabulary": Layout(
        t=2, p=2, options={"vocabulary": 61}, make_batch=partial(texts, vocabulary=61), b=2, accumulate=2, sizes=(4, 4)
    ),
    "tensor peers and replicas, padded and tied": Layout(
        t=2, d=2, options={"tied": True}, make_batch=partial(texts, padded=True), sizes=(4, 6)
    ),
    "tensor peers of four": Layout(t=4, options={"tied": True}, make_batch=partial(texts, padded=True)),
    "recomputed": Layout(t=2, p=2, options={"tied": True}, strategy={"recompute": "full", "recompute_every": 2}),
    "scores recomputed": Layout(p=2, v=2, strategy={"recompute": "selective", "recompute_layers": [1, 0, 1, 1]}),
    "asked split": Layout(p=2, strategy={"pipeline_split": (1, 3)}),
    "blocks that return tuples": Layout(p=2, model=PairNet, make_batch=points),
    "tuples, interleaved": Layout(p=2, v=2, model=PairNet, make_batch=points),
    "shared table": Layout(p=2, model=TableNet, make_batch=points, strategy={"shared": ("table",)}),
    "shared table, pipeline of four": Layout(
        p=4, model=TableNet, make_batch=points, strategy={"shared": ("table",)}, clip=0.1
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layout_gives_the_numbers_of_one_process(layout):
    make = partial(layout.model, **layout.options)
    batches = [layout.make_batch(size, seed=i) for i, size in enumerate(layout.sizes)]
    run, _ = parallel(
        make,
        batches,
        trainer={
            "accumulate_grad_batches": layout.accumulate,
            "gradient_clip_val": layout.clip,
            "gradient_clip_algorithm": layout.clip_algorithm,
        },
        tensor_parallel_size=layout.t,
        pipeline_parallel_size=layout.p,
        data_parallel_size=layout.d,
        virtual_pipeline_size=layout.v,
        micro_batch_size=layout.b,
        schedule=layout.schedule,
        **({"tensor_parallel_plan": PLAN} if layout.t > 1 else {}),
        **layout.strategy,
    )
    clipping = {"clip": layout.clip, "clip_algorithm": layout.clip_algorithm}
    assert_same(run, serial(make, batches, accumulate=layout.accumulate, **clipping))


@pytest.mark.parametrize("world_size", [1, 2])
def test_name_of_the_strategy_is_enough(world_size):
    batches = [texts(4, seed=i) for i in range(3)]
    run, parts = parallel_by_name(GPT, batches, world_size)
    assert_same(run, serial(GPT, batches))
    assert len(parts) == world_size


def parallel_by_name(make, batches, world_size):
    """`oracle.parallel` with `Trainer(strategy="ptdp")`, and every setting its default."""
    parts = run_spmd(train, world_size=world_size, make=make, batches=batches, trainer={}, strategy="ptdp")
    return join(parts), parts
