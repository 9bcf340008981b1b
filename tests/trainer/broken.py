"""A hundred configurations that cannot run, as data; test_broken_configurations.py runs them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    Timer,
)
from torch import Tensor, nn, optim

from lightning_ptdp.preflight import inventory
from tests.models import GPT
from tests.trainer.test_layouts import PLAN


class By:
    """A value that differs between ranks: of rank 1, and of the others."""

    def __init__(self, others: Any, rank_1: Any) -> None:
        self._others, self._rank_1 = others, rank_1

    def at(self, rank: int) -> Any:
        """The value of a rank."""
        return self._rank_1 if rank == 1 else self._others


@dataclass(frozen=True)
class Broken:
    """A configuration, and what must be said of it.

    told: fragments of the text: what is at fault, with its numbers, and a way out. make: the module, maybe `By` rank.
    t, p, d: sizes. strategy, trainer: further arguments. around: entered on a rank around the run.
    """

    told: tuple[str, ...]
    make: Any = GPT
    t: Any = 1
    p: Any = 1
    d: Any = "auto"
    world_size: int = 2
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    around: Callable[[int], AbstractContextManager[Any]] = lambda rank: nullcontext()


def row(*told: str, **values: Any) -> Broken:
    """A row; what is no field of `Broken` is an argument of the strategy."""
    own = {name: values.pop(name) for name in list(values) if name in Broken.__dataclass_fields__}
    return Broken(told, strategy=values, **own)


# -- modules that cannot be split --------------------------------------------------------------------------------------


class Manual(GPT):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Yielding(GPT):
    """Its step is a generator."""

    def training_step(self, batch, batch_idx):
        yield self.loss(batch)


class Waiting(GPT):
    """Its step is a coroutine."""

    async def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Drawing(GPT):
    """Its step draws batches itself."""

    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class Edited(GPT):
    """Changed by a function after it is built."""

    def __init__(self, edit: Callable[[GPT], Any], **options: Any) -> None:
        super().__init__(**options)
        edit(self)


def edited(edit: Callable[[Any], Any], **options: Any) -> Callable[[], GPT]:
    """Makes a GPT and changes it."""
    return partial(Edited, edit, **options)


def without_a_list(gpt: Any) -> None:
    """The blocks become ordinary children."""
    for i, block in enumerate(gpt.blocks):
        setattr(gpt, f"block_{i}", block)
    del gpt.blocks


def one_block_four_times(gpt: Any) -> None:
    """Weights shared by running one block again."""
    gpt.blocks = nn.ModuleList([gpt.blocks[0]] * 4)


def scripted(gpt: Any) -> None:
    """Blocks in TorchScript."""
    gpt.blocks = nn.ModuleList(torch.jit.trace(nn.Linear(32, 32), torch.ones(2, 32)) for _ in range(4))


def normed(norm: Callable[[nn.Module], Any]) -> Callable[[Any], None]:
    """A layer that the plan splits gets a norm of its weights."""

    def edit(gpt: Any) -> None:
        norm(gpt.blocks[0].up)

    return edit


class Subclassed(Tensor):
    """Stands for quantized and distributed tensors."""


def subclassed(gpt: Any) -> None:
    """A parameter of another kind of tensor."""
    gpt.head.weight = nn.Parameter(gpt.head.weight.data.as_subclass(Subclassed))


def routed(gpt: Any) -> None:
    """As a mixture of experts of transformers."""
    gpt.config = type("Config", (), {"output_router_logits": True})()


def with_heads(number: int) -> Callable[[Any], None]:
    """Attention that says how many heads it has."""

    def edit(gpt: Any) -> None:
        for block in gpt.blocks:
            block.attention.num_heads, block.attention.head_size = number, 32 // number

    return edit


def set_(**attributes: Any) -> Callable[[Any], None]:
    """Sets attributes of the module."""

    def edit(gpt: Any) -> None:
        for name, value in attributes.items():
            setattr(gpt, name, value)

    return edit


def frozen(name: str) -> Callable[[Any], None]:
    """Freezes a child."""
    return lambda gpt: gpt.get_submodule(name).requires_grad_(False)


# -- optimizers that cannot be split ----------------------------------------------------------------------------------


class Lamb(optim.Optimizer):
    """Scales each parameter's step by its norm."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad * p.norm() / p.grad.norm())
        return loss


class GlobalNorm(optim.SGD):
    """Clips by the norm of all it holds."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        closure()
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step()


class Around(optim.Optimizer):
    """Wraps another optimizer, which its options do not tell."""

    def __init__(self, params: Iterable[Any], inner: Any) -> None:
        super().__init__(params, {})
        self.inner = inner(self.param_groups)


class NeedsCuda(optim.SGD):
    """Cannot step here."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        raise RuntimeError("only on CUDA")


class Optimized(GPT):
    """With an optimizer of one's own."""

    def __init__(self, optimizer: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.make_optimizer = optimizer

    def configure_optimizers(self) -> Any:
        """What was given."""
        return self.make_optimizer(list(self.parameters()))


def optimized(optimizer: Callable[[Any], Any]) -> Callable[[], GPT]:
    """Makes a GPT with an optimizer."""
    return partial(Optimized, optimizer)


def stepped(optimizer: optim.Optimizer, step_size: int) -> Any:
    """With a schedule."""
    return [optimizer], [optim.lr_scheduler.StepLR(optimizer, step_size)]


# -- ranks that differ ------------------------------------------------------------------------------------------------


def on_rank_1(*patches: Any) -> Callable[[int], AbstractContextManager[Any]]:
    """Patches that hold on rank 1 only."""

    def enter(rank: int) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for each in patches if rank == 1 else ():
            stack.enter_context(patch.object(*each))
        return stack

    return enter


SIZE = "must be a whole number of at least 1"
OTHERS = "let no argument depend on the rank"
SAME_MODULE = "build it from the same arguments on every rank"
SETTINGS = "let no setting or callback depend on the rank"
TENSORS = {"t": 2, "tensor_parallel_plan": PLAN}
ELEMENTWISE = "use an optimizer that treats each element alone (AdamW, SGD)"

CONFIGURATIONS: dict[str, Broken] = {
    # arguments by themselves
    "t = 0": row("tensor_parallel_size", SIZE, "got 0", t=0),
    "t < 0": row("tensor_parallel_size", SIZE, "got -2", t=-2),
    "t in words": row("tensor_parallel_size", "or 'auto'", "got 'two'", t="two"),
    "t as a fraction": row("tensor_parallel_size", SIZE, "got 2.0", t=2.0),
    "t as a truth": row("tensor_parallel_size", SIZE, "got True", t=True),
    "p = 0": row("pipeline_parallel_size", SIZE, "got 0", p=0),
    "p as None": row("pipeline_parallel_size", SIZE, "got None", p=None),
    "p as text": row("pipeline_parallel_size", SIZE, "got '2'", p="2"),
    "d = 0": row("data_parallel_size", SIZE, "got 0", d=0),
    "d as a list": row("data_parallel_size", SIZE, "got [1]", d=[1]),
    "v = 0": row("virtual_pipeline_size", SIZE, "got 0", p=2, virtual_pipeline_size=0),
    "v = auto": row("virtual_pipeline_size", SIZE, "got 'auto'", p=2, virtual_pipeline_size="auto"),
    "v as a fraction": row("virtual_pipeline_size", SIZE, "got 1.5", p=2, virtual_pipeline_size=1.5),
    "b = 0": row("micro_batch_size", SIZE, "got 0", micro_batch_size=0),
    "b as None": row("micro_batch_size", "or 'auto'", "got None", micro_batch_size=None),
    "evaluation's b = 0": row("eval_micro_batch_size", "or None", "got 0", eval_micro_batch_size=0),
    "evaluation's b = auto": row("eval_micro_batch_size", "or None", "got 'auto'", eval_micro_batch_size="auto"),
    "unknown schedule": row("schedule must be one of 'auto'", "'1f1b'", "got 'zero-bubble'", schedule="zero-bubble"),
    "schedule in capitals": row("schedule must be one of", "got '1F1B'", p=2, schedule="1F1B"),
    "schedule as None": row("schedule must be one of", "got None", schedule=None),
    "sequence parallel in words": row("sequence_parallel must be True or False", "got 'yes'", sequence_parallel="yes"),
    # arguments together
    "v without a pipeline": row("pipeline_parallel_size=1 has none", "use virtual", virtual_pipeline_size=2),
    "1f1b with chunks": row(
        "got virtual_pipeline_size=2", "'interleaved'", p=2, virtual_pipeline_size=2, schedule="1f1b"
    ),
    "sequence parallel alone": row("tensor_parallel_size=1 has one", "leave it off", sequence_parallel=True),
    "split for one stage": row("2 * 1 = 2 stages", "got 1: [4]", p=2, pipeline_split=[4]),
    "split for ranks, not stages": row(
        "2 * 2 = 4 stages", "got 2", p=2, virtual_pipeline_size=2, pipeline_split=[2, 2]
    ),
    "split with nothing": row("all at least 1", "got [4, 0]", p=2, pipeline_split=[4, 0]),
    "split below nothing": row("all at least 1", "got [5, -1]", p=2, pipeline_split=(5, -1)),
    "split in fractions": row("all at least 1", "got [2.0, 2.0]", p=2, pipeline_split=[2.0, 2.0]),
    "split as a number": row("pipeline_split must be a list", "got 2", p=2, pipeline_split=2),
    "split of more blocks": row("add up to the 4 blocks of 'blocks'", "5 blocks", p=2, pipeline_split=[2, 3]),
    "split of fewer blocks": row("add up to the 4 blocks of 'blocks'", "2 blocks", p=2, pipeline_split=[1, 1]),
    # numbers of processes
    "2 processes for 4": row("got 2 processes", "t * p: ", "= 4; use devices * num_nodes = 4", t=2, p=2),
    "3 processes for 2": row("got 3 processes", "= 2; use devices * num_nodes = 2 or 4", p=2, world_size=3),
    "3 processes for 4": row("got 3 processes", "use devices * num_nodes = 4", t=2, p=2, world_size=3),
    "d of too many": row("got 2 processes", "= 6; use devices * num_nodes = 6", "data_parallel_size='auto'", p=2, d=3),
    "d of too few": row("got 2 processes", "data_parallel_size=1 = 1; use", d=1),
    "d of half": row("got 3 processes", "data_parallel_size=2 = 2; use devices * num_nodes = 2", d=2, world_size=3),
    # blocks
    "v p above the blocks": row("p * v = 6 stages", "has 4; use", "<= 4", p=2, virtual_pipeline_size=3),
    "p above the blocks": row(
        "p * v = 2 stages needs a block", "has 1", p=2, make=partial(GPT, num_layers=1), pipeline_blocks="blocks"
    ),
    "no list of blocks": row("holds no nn.ModuleList", "put the layers into", p=2, make=edited(without_a_list)),
    "list that is none": row("pipeline_blocks='layers' is not", "it has 'blocks'", p=2, pipeline_blocks="layers"),
    "list that is a norm": row("pipeline_blocks='norm' is not", "it has 'blocks'", p=2, pipeline_blocks="norm"),
    "list as an index": row("pipeline_blocks must be the name", "got 3", p=2, pipeline_blocks=3),
    "one block again and again": row(
        "lists 4 blocks that are 1 modules", "a module of its own", p=2, make=edited(one_block_four_times)
    ),
    "TorchScript": row("are TorchScript", "use the plain modules", p=2, make=edited(scripted)),
    # modules outside the blocks
    "first unknown": row("first=['embed'] name no module", "'token'", p=2, first=["embed"]),
    "last unknown": row("last=['lm_head'] name no module", "'head'", p=2, last=["lm_head"]),
    "shared unknown": row("shared=['model.token'] name no module", "'token'", p=2, shared=["model.token"]),
    "first as text": row("first must be a list", "got 'token'", "first=['...']", p=2, first="token"),
    "last as a module": row("last must be a list", "last=['...']", p=2, last=[nn.Identity()]),
    "shared as None": row("shared must be a list", "got None", p=2, shared=None),
    "first and last": row("['norm'] are in two", "keep one", p=2, first=["norm"], last=["norm"]),
    # plans
    "no plan": row("tensor_parallel_size=2 needs a plan", '"blocks.*.down": "rowwise"', t=2),
    "plan of nothing": row("tensor_parallel_size=2 needs a plan", "pass it as", t=2, tensor_parallel_plan={}),
    "plan as a list": row("must be a dict of name patterns", "got ['head']", t=2, tensor_parallel_plan=["head"]),
    "plan as text": row("must be a dict of name patterns", "got 'colwise'", t=2, tensor_parallel_plan="colwise"),
    "plan of numbers": row("must be a dict of name patterns", "{'head': 1}", t=2, tensor_parallel_plan={"head": 1}),
    "unknown style": row(
        "unknown styles {'head': 'columns'}", "known are colwise", t=2, tensor_parallel_plan={"head": "columns"}
    ),
    "plan of other names": row(
        "['model.head'], which match no module", "'head'", t=2, tensor_parallel_plan={"model.head": "colwise"}
    ),
    "linear style on an embedding's parent": row(
        "'blocks.0.attention' (Attention) holds modules",
        "name those",
        t=2,
        tensor_parallel_plan={"blocks.*.attention": "colwise"},
    ),
    "embedding style on a linear": row(
        "is for nn.Embedding, and 'head' is a Linear", t=2, tensor_parallel_plan={"head": "embedding_rowwise"}
    ),
    "tied and cut in two ways": row(
        "are one tied parameter",
        "give both styles",
        t=2,
        make=partial(GPT, tied=True),
        tensor_parallel_plan={"token": "embedding_colwise", "head": "colwise"},
    ),
    "tied and half named": row(
        "are one tied parameter",
        "name both",
        t=2,
        make=partial(GPT, tied=True),
        tensor_parallel_plan={"token": "embedding_rowwise"},
    ),
    "heads": row(
        "has 4 heads, and tensor_parallel_size=3; use one of [1, 2, 4]",
        t=3,
        world_size=3,
        make=partial(GPT, hidden=12),
        tensor_parallel_plan=PLAN,
    ),
    "one head": row("has 1 heads, and tensor_parallel_size=2; use one of [1]", **TENSORS, make=edited(with_heads(1))),
    "halves of an odd dim": row(
        "needs two halves, and 'head.weight' has 61",
        t=2,
        make=partial(GPT, vocabulary=61),
        tensor_parallel_plan={"head": "packed_colwise"},
    ),
    "thirds of no multiple": row(
        "'head.weight' has 64 outputs", "separate projections", t=2, tensor_parallel_plan={"head": "packed_qkv_colwise"}
    ),
    "rotary width unknown": row(
        "how many outputs of 'head' are rotary",
        "leave it out of the plan",
        t=2,
        tensor_parallel_plan={"head": "mla_kv_a_proj"},
    ),
    "too few elements": row(
        "each of 2 peers",
        "has 1 elements: too few",
        t=2,
        make=partial(GPT, max_length=1),
        tensor_parallel_plan={"position": "embedding_rowwise"},
    ),
    "size that t does not divide": row(
        "num_parts = 3 is to be divided by tensor_parallel_size=2",
        t=2,
        make=edited(set_(num_parts=3)),
        tensor_parallel_plan={"num_parts": "local_size", "head": "colwise"},
    ),
    "no norm for the sequence": row(
        'the style "sequence_parallel"', "or use sequence_parallel=False", **TENSORS, sequence_parallel=True
    ),
    "weight norm": row(
        "'blocks.0.up' (ParametrizedLinear)", **TENSORS, make=edited(normed(nn.utils.parametrizations.weight_norm))
    ),
    "spectral norm": row(
        "'blocks.0.up' (Linear)",
        "(bias, weight_orig)",
        "remove its weight norm",
        **TENSORS,
        make=edited(normed(nn.utils.spectral_norm)),
    ),
    # modules and steps
    "manual optimization": row("manual optimization", "use automatic optimization", p=2, make=Manual),
    "generator": row("training_step is a generator", "let it return", make=Yielding),
    "coroutine": row("training_step is a coroutine", "let it return", make=Waiting),
    "step that draws": row("dataloader_iter", "take the batch instead", p=2, make=Drawing),
    "router logits": row("config.output_router_logits", "= False", p=2, make=edited(routed)),
    "lazy layers": row(
        "['head.weight', 'head.bias'] (2 in all)", "input sizes", p=2, make=edited(set_(head=nn.LazyLinear(64)))
    ),
    "other kinds of tensors": row("'head.weight'", "(Subclassed)", "plain tensors", p=2, make=edited(subclassed)),
    # optimizers
    "Adafactor on pieces": row(
        "Adafactor steps a piece of a matrix",
        "tensor_parallel_size=2",
        ELEMENTWISE,
        **TENSORS,
        make=optimized(optim.Adafactor),
    ),
    "Muon on pieces": row(
        "Muon steps a piece",
        ELEMENTWISE,
        **TENSORS,
        make=optimized(lambda ps: optim.Muon([p for p in ps if p.ndim == 2])),
    ),
    "LBFGS on stages": row("LBFGS searches", "pipeline_parallel_size=2", ELEMENTWISE, p=2, make=optimized(optim.LBFGS)),
    "LBFGS on pieces": row(
        "LBFGS searches", "tensor_parallel_size=2", ELEMENTWISE, **TENSORS, make=optimized(optim.LBFGS)
    ),
    "SparseAdam": row("SparseAdam takes sparse gradients", "use Adam", p=2, make=optimized(optim.SparseAdam)),
    "LAMB on pieces": row("Lamb steps a piece", ELEMENTWISE, **TENSORS, make=optimized(Lamb)),
    "a norm over all on stages": row(
        "GlobalNorm steps a parameter otherwise",
        "pipeline_parallel_size=2",
        ELEMENTWISE,
        p=2,
        make=optimized(partial(GlobalNorm, lr=0.1)),
    ),
    "a norm over all on pieces": row(
        "GlobalNorm steps a parameter otherwise", ELEMENTWISE, **TENSORS, make=optimized(partial(GlobalNorm, lr=0.1))
    ),
    "optimizer around another": row(
        "asks for inner", "is_elementwise = True", p=2, make=optimized(lambda ps: Around(ps, optim.SGD))
    ),
    "optimizer that cannot step": row(
        "RuntimeError: only on CUDA", "is_elementwise = True", p=2, make=optimized(partial(NeedsCuda, lr=0.1))
    ),
    "optimizer of other parameters": row(
        "1 parameters (of shapes [3])",
        "register them",
        p=2,
        make=optimized(lambda ps: optim.SGD([*ps, nn.Parameter(torch.ones(3))], lr=0.1)),
    ),
    "recomputation of another kind": row(
        "recompute must be one of 'none', 'full', 'selective'; got 'all'", recompute="all"
    ),
    "counts for recomputation nowhere": row(
        "recompute_layers=2 says where to recompute, and recompute='none'", "use recompute='full'", recompute_layers=2
    ),
    "recomputation of blocks that are not there": row(
        "recompute_layers=[1, 3] asks for more blocks than stages have: they have [2, 2]",
        "use at most these",
        p=2,
        recompute="full",
        recompute_layers=[1, 3],
    ),
    "recomputation of modules that are not there": row(
        "recompute_modules names ['blocks.*.core'], which match no module in the blocks",
        "blocks.*.attention",
        recompute="selective",
        recompute_modules=["blocks.*.core"],
    ),
    "recomputation without blocks": row(
        "recompute='full' runs a list of blocks again, and none was found",
        "use recompute='none'",
        make=edited(without_a_list),
        recompute="full",
    ),
    # callbacks
    "pruning on pieces": row(
        "ModelPruning compares weights of the whole model",
        **TENSORS,
        trainer={"callbacks": lambda: [ModelPruning("l1_unstructured", amount=0.5)]},
    ),
    "average of slices": row(
        "EMAWeightAveraging averages 16-bit weights",
        "leave distributed_optimizer out",
        d=2,
        distributed_optimizer=True,
        trainer={"callbacks": lambda: [EMAWeightAveraging()], "precision": "bf16-true"},
    ),
    # ranks that differ: versions
    "torch": row(
        "rank 1 has torch 2.12.0 where rank 0 has",
        "install the same",
        around=on_rank_1((torch, "__version__", "2.12.0")),
    ),
    "python": row(
        "rank 1 has python 3.9 where rank 0 has",
        "install the same",
        p=2,
        around=on_rank_1((inventory.platform, "python_version_tuple", lambda: ("3", "9", "1"))),
    ),
    "lightning and torchmetrics": row(
        "rank 1 has lightning 2.5",
        "rank 1 has torchmetrics 1.0",
        p=2,
        around=on_rank_1((lightning, "__version__", "2.5"), (torchmetrics, "__version__", "1.0")),
    ),
    "lightning_ptdp": row(
        "rank 1 has lightning_ptdp 0.0.1 where rank 0 has", around=on_rank_1((inventory, "VERSION", "0.0.1"))
    ),
    # ranks that differ: arguments
    "t of one rank": row(
        "rank 1 has tensor_parallel_size 2 where rank 0 has 1", OTHERS, t=By(1, 2), tensor_parallel_plan=PLAN
    ),
    "p of one rank": row("rank 1 has pipeline_parallel_size 1 where rank 0 has 2", OTHERS, p=By(2, 1)),
    "p of one rank in four": row(
        "rank 1 has pipeline_parallel_size 2 where ranks 0, 2 and 3 have 4", OTHERS, p=By(4, 2), world_size=4
    ),
    "v of one rank": row(
        "rank 1 has virtual_pipeline_size 2 where rank 0 has 1", OTHERS, p=2, virtual_pipeline_size=By(1, 2)
    ),
    "b of one rank": row("rank 1 has micro_batch_size 2 where rank 0 has 1", OTHERS, p=2, micro_batch_size=By(1, 2)),
    "schedule of one rank": row(
        "rank 1 has schedule 'gpipe' where rank 0 has 'auto'", OTHERS, p=2, schedule=By("auto", "gpipe")
    ),
    "split of one rank": row(
        "rank 1 has pipeline_split [3, 1] where rank 0 has [2, 2]", p=2, pipeline_split=By([2, 2], [3, 1])
    ),
    "plan of one rank": row(
        "rank 1 has tensor_parallel_plan {}",
        "on rank 1: tensor_parallel_size=2 needs a plan",
        t=2,
        tensor_parallel_plan=By(PLAN, {}),
    ),
    "fault of one rank": row("on rank 1: schedule must be one of", "got 'zigzag'", p=2, schedule=By("auto", "zigzag")),
    # ranks that differ: the module
    "layers of one rank": row(
        "rank 1 has parameter 'blocks.4.",
        "[32] float32, trained where rank 0 has none",
        SAME_MODULE,
        p=2,
        make=By(GPT, partial(GPT, num_layers=5)),
    ),
    "width of one rank": row(
        "rank 1 has parameter 'token.weight' [64, 16] float32",
        "rank 0 has [64, 32]",
        SAME_MODULE,
        p=2,
        make=By(GPT, partial(GPT, hidden=16)),
    ),
    "dtype of one rank": row(
        "'head.weight' [64, 32] bfloat16", SAME_MODULE, make=By(GPT, edited(lambda gpt: gpt.head.bfloat16()))
    ),
    "freezing on one rank": row(
        "'head.weight' [64, 32] float32, frozen where rank 0 has [64, 32] float32, trained",
        "freeze alike",
        p=2,
        make=By(GPT, edited(frozen("head"))),
    ),
    "tie on one rank": row(
        "float32, trained, tied to 'token.weight' where", SAME_MODULE, p=2, make=By(GPT, partial(GPT, tied=True))
    ),
    "buffer on one rank": row(
        "rank 1 has buffer 'mask' [3] float32 where rank 0 has none",
        make=By(GPT, edited(lambda gpt: gpt.register_buffer("mask", torch.ones(3)))),
    ),
    "no blocks on one rank": row(
        "on rank 1: ", "holds no nn.ModuleList", SAME_MODULE, p=2, make=By(GPT, edited(without_a_list))
    ),
    "manual on one rank": row(
        "on rank 1: manual optimization", "rank 1 has automatic_optimization False", p=2, make=By(GPT, Manual)
    ),
    "plan that one module carries": row(
        "rank 1 has style of 'head'",
        t=2,
        make=By(
            edited(set_(tensor_parallel_plan=PLAN)), edited(set_(tensor_parallel_plan=PLAN | {"head": "replicate"}))
        ),
    ),
    # ranks that differ: Trainer and optimizers
    "accumulation of one rank": row(
        "rank 1 has accumulate_grad_batches 2 where rank 0 has 1",
        SETTINGS,
        trainer={"accumulate_grad_batches": By(1, 2)},
    ),
    "clipping of one rank": row(
        "rank 1 has gradient_clip_val 1.0 where rank 0 has None",
        SETTINGS,
        p=2,
        trainer={"gradient_clip_val": By(None, 1.0)},
    ),
    "precision of one rank": row(
        "rank 1 has precision bf16-mixed where rank 0 has 32-true",
        p=2,
        trainer={"precision": By("32-true", "bf16-mixed")},
    ),
    "epochs of one rank": row("rank 1 has max_epochs 2 where rank 0 has 1", SETTINGS, trainer={"max_epochs": By(1, 2)}),
    "batches of one rank": row(
        "rank 1 has limit_train_batches 1 where rank 0 has 1.0", trainer={"limit_train_batches": By(1.0, 1)}
    ),
    "stopping on one rank": row(
        "rank 1 has callback EarlyStopping",
        "where rank 0 has none",
        SETTINGS,
        p=2,
        trainer={"callbacks": By(list, lambda: [EarlyStopping("train_loss")])},
    ),
    "checkpoints on one rank": row(
        "callback ModelCheckpoint",
        SETTINGS,
        p=2,
        trainer={"callbacks": By(list, lambda: [ModelCheckpoint(every_n_train_steps=1)]), "enable_checkpointing": True},
    ),
    "timer on one rank": row(
        "callback Timer", SETTINGS, trainer={"callbacks": By(list, lambda: [Timer({"hours": 1})])}
    ),
    "schedule of accumulation on one rank": row(
        "callback GradientAccumulationScheduler",
        trainer={"callbacks": By(list, lambda: [GradientAccumulationScheduler({1: 2})])},
    ),
    "optimizer of one rank": row(
        "rank 1 has optimizer 0 Adam where rank 0 has SGD",
        "configure_optimizers not depend",
        p=2,
        make=By(GPT, optimized(optim.Adam)),
    ),
    "rate of one rank": row(
        "option 'lr' of group 0 of optimizer 0 0.2 where rank 0 has 0.1", p=2, make=By(GPT, partial(GPT, lr=0.2))
    ),
    "groups of one rank": row(
        "place of",
        "group 1, number 0",
        make=By(GPT, optimized(lambda ps: optim.SGD([{"params": ps[:1]}, {"params": ps[1:]}], lr=0.1))),
    ),
    "scheduler of one rank": row(
        "rank 1 has scheduler 0 StepLR",
        "where rank 0 has none",
        make=By(optimized(lambda ps: optim.SGD(ps, lr=0.1)), optimized(lambda ps: stepped(optim.SGD(ps, lr=0.1), 2))),
    ),
    "optimizer to refuse on one rank": row(
        "on rank 1: LBFGS searches", ELEMENTWISE, p=2, make=By(GPT, optimized(optim.LBFGS))
    ),
    # several at once
    "processes and blocks": row("got 2 processes", "p * v = 8 stages needs a block", p=4, virtual_pipeline_size=2, d=3),
    "processes and heads": row(
        "got 2 processes",
        "has 4 heads, and tensor_parallel_size=3",
        t=3,
        p=2,
        make=partial(GPT, hidden=12),
        tensor_parallel_plan=PLAN,
    ),
    "arguments and a module": row(
        "got 'zigzag'",
        "got 0",
        "manual optimization",
        "p * v = 2 stages",
        p=2,
        schedule="zigzag",
        micro_batch_size=0,
        make=edited(set_(automatic_optimization=False), num_layers=1),
        pipeline_blocks="blocks",
    ),
    "each rank its own": row(
        "on rank 0: micro_batch_size must be",
        "on rank 1: eval_micro_batch_size must be",
        p=2,
        micro_batch_size=By(0, 1),
        eval_micro_batch_size=By(None, 0),
    ),
    "module, Trainer and version": row(
        "rank 1 has torch 2.12.0",
        "rank 1 has max_epochs 2",
        "'token.weight' [64, 16]",
        p=2,
        trainer={"max_epochs": By(1, 2)},
        make=By(GPT, partial(GPT, hidden=16)),
        around=on_rank_1((torch, "__version__", "2.12.0")),
    ),
}
