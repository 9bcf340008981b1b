"""Two stages spliced in one process, and every error that a step can run into."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.pipeline.partition import partition
from lightning_ptdp.pipeline.skeleton import Payload, Skeleton
from tests.models import GPT, PairNet, points, texts
from tests.pipeline.runs import PlainRun

CPU = torch.device("cpu")


def split(module, num_stages=2, stages=None, **places):
    """One copy of a module for each stage, split as the rank of that stage would."""
    cut = partition(module, num_stages, **places)
    copies = [copy.deepcopy(module) for _ in range(num_stages)]
    return [(whole, Skeleton(whole, cut, (stage,), CPU)) for stage, whole in enumerate(copies)]


def run(parts, step, events=None):
    """The loss of a step that goes through all stages, and what crossed the cuts. events: takes what was told."""
    received, crossed, result = None, [], None
    for stage, (module, skeleton) in enumerate(parts):
        if received is not None:
            for tensor in received.tensors:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        stages = PlainRun(lambda *_, module=module: step(module), [] if events is None else events)
        sent, result = skeleton.forward(stage, 0, received, stages)
        if sent is not None:
            received = Payload(tuple(t.detach().clone() for t in sent.tensors), sent.structure, sent.others)
            crossed.append((sent, received))
    return result, crossed


def backward(loss, crossed):
    loss.backward()
    for sent, received in reversed(crossed):
        pairs = [(s, r.grad) for s, r in zip(sent.tensors, received.tensors, strict=True) if s.requires_grad]
        torch.autograd.backward([s for s, _ in pairs], [gradient for _, gradient in pairs])


def gradients(modules):
    """By name, summed where several stages own a parameter."""
    found = {}
    for module in modules:
        for name, p in module.named_parameters():
            if p.grad is not None:
                found[name] = found.get(name, 0) + p.grad
    return found


def make_gpt(**options):
    module = GPT(num_layers=4, hidden=8, num_heads=2, vocabulary=16, max_length=8, **options).double()
    return module, texts(3, length=6, vocabulary=16)


def step_of(batch):
    return lambda module: module.loss(batch)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_spliced_stages_give_the_loss_and_gradients_of_the_whole(num_stages, tied):
    module, batch = make_gpt(tied=tied)
    parts = split(module, num_stages)
    loss, crossed = run(parts, step_of(batch))
    backward(loss, crossed)
    whole = module.loss(batch)
    whole.backward()
    assert loss.item() == whole.item()
    found = gradients(part for part, _ in parts)
    assert found.keys() == gradients([module]).keys()
    for name, gradient in gradients([module]).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14)


def test_tuples_cross_the_cut_in_their_structure():
    module, batch = PairNet().double(), points(3)
    batch = {name: column.double() for name, column in batch.items()}
    loss, crossed = run(split(module, 2), lambda part: part.training_step(batch, 0))
    assert loss.item() == module.training_step(batch, 0).item()
    assert [t.dtype for t in crossed[0][0].tensors] == [torch.float64, torch.int64]


def test_each_stage_keeps_its_own_parameters_and_both_ends_what_is_tied():
    module, _ = make_gpt(tied=True)
    (first, _), (last, _) = split(module)
    plain = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    held = [{name for name, _ in part.named_parameters(remove_duplicate=False)} for part in (first, last)]
    assert held[0] | held[1] == plain
    assert held[0] & held[1] == {"token.weight", "head.weight"}
    assert first.head.weight is first.token.weight


def test_all_parameters_are_listed_within_whole():
    module, _ = make_gpt()
    plain = [name for name, _ in module.named_parameters()]
    part, skeleton = split(module)[0]
    with skeleton.whole():
        assert [name for name, _ in part.named_parameters()] == plain
    assert len(list(part.named_parameters())) < len(plain)


def test_code_before_and_after_the_blocks_can_be_told():
    module, batch = make_gpt()
    events = []
    run(split(module), step_of(batch), events)
    assert events == ["stage 0 starts", "stage 1 starts", "blocks are through"]


def test_classes_and_attributes_of_blocks_stay():
    module, _ = make_gpt()
    part, _ = split(module)[0]
    for block, plain in zip(part.blocks, module.blocks, strict=True):
        assert isinstance(block, type(plain))
        assert type(block).__name__ == type(plain).__name__


def test_users_checkpoint_of_a_block_is_exact():
    module, batch = make_gpt()

    def step(part):
        x = part.token(batch["ids"]) + part.position(torch.arange(6))
        for block in part.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return part.head(part.norm(x)).square().mean()

    parts = split(module)
    loss, crossed = run(parts, step)
    backward(loss, crossed)
    step(module).backward()
    for name, gradient in gradients([module]).items():
        torch.testing.assert_close(gradients(p for p, _ in parts)[name], gradient, rtol=0, atol=1e-14)


# What a step may not do.


def test_users_handler_of_exceptions_does_not_catch_the_exit():
    module, batch = make_gpt()

    def step(part):
        try:
            return part.loss(batch)
        except Exception:
            return torch.zeros(())

    loss, _ = run(split(module), step)
    assert loss.item() == module.loss(batch).item()


def test_second_call_of_the_model_is_refused():
    module, batch = make_gpt()
    with pytest.raises(RuntimeError, match=r"'token' ran after the last block.*calls the model a second time"):
        run(split(module), lambda part: part.loss(batch) + part.loss(batch))


def test_second_call_is_refused_where_nothing_stands_before_the_blocks():
    blocks = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})

    def step(part):
        total = 0.0
        for _ in range(2):
            x = torch.ones(1, 2)
            for block in part["blocks"]:
                x = block(x)
            total = total + x.sum()
        return total

    with pytest.raises(
        RuntimeError, match="block 0 of 'blocks' ran again after block 1: the step calls the model a seco"
    ):
        run(split(blocks), step)


def test_blocks_out_of_order_are_refused():
    module, batch = make_gpt()

    def step(part):
        x = part.token(batch["ids"])
        for i in (0, 2, 1, 3):
            x = part.blocks[i](x)
        return x.sum()

    with pytest.raises(
        RuntimeError, match=r"block 2 of 'blocks' ran where block 1 was due.*no loops, skips or layer dr"
    ):
        run(split(module), step)


def test_step_that_does_not_call_the_model_is_refused():
    module, _ = make_gpt()
    with pytest.raises(RuntimeError, match="the step returned after 0 of the 4 blocks of 'blocks'"):
        run(split(module), lambda part: torch.zeros(()))


def test_step_that_swallows_the_exit_is_refused():
    module, batch = make_gpt()

    def step(part):
        try:
            return part.loss(batch)
        except BaseException:
            return torch.zeros(())

    with pytest.raises(RuntimeError, match=r"returned after 3 of the 4 blocks.*lets BaseException through"):
        run(split(module), step)


def test_module_wrongly_placed_last_asks_to_be_named():
    module, batch = make_gpt()
    with pytest.raises(RuntimeError, match=r"'position' ran before the last block.*name it in first=\[...\]"):
        run(split(module, last=("position",)), step_of(batch))


def test_module_wrongly_placed_first_asks_to_be_named():
    module, batch = make_gpt()
    with pytest.raises(RuntimeError, match=r"'norm' ran after the last block, on a stage.*last=\[...\]"):
        run(split(module, first=("norm",)), step_of(batch))


def test_hollow_weight_that_is_used_makes_the_loss_nan():
    module, batch = make_gpt()
    loss, _ = run(split(module), lambda part: part.loss(batch) + part.token.weight.sum())
    assert loss.isnan()


def test_twin_that_cannot_answer_says_whose_it_is():
    class Picky(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.max().item()

    module = nn.ModuleDict({"picky": Picky(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})

    def step(part):
        x = part["picky"](torch.ones(1, 2))
        for block in part["blocks"]:
            x = block(x)
        return x.sum()

    with pytest.raises(RuntimeError) as caught:
        run(split(module), step)
    assert "raised while 'picky', which another stage owns, was asked for the shape" in caught.value.__notes__[0]
    assert "name it in shared=[...]" in caught.value.__notes__[0]


def test_block_without_a_tensor_in_its_output_cannot_end_a_stage():
    class Silent(nn.Linear):
        def forward(self, x):
            return None

    module = nn.ModuleDict({"blocks": nn.ModuleList([Silent(2, 2), nn.Linear(2, 2)])})
    with pytest.raises(TypeError, match="block 0 of 'blocks' returned NoneType, which holds no tensor"):
        run(split(module), lambda part: part["blocks"][1](part["blocks"][0](torch.ones(1, 2))))


@pytest.mark.parametrize(
    "call", [lambda m: m(torch.ones(1, 2, dtype=torch.long)), lambda m: m.blocks[3](torch.ones(1))]
)
def test_split_module_outside_a_run_raises(call):
    module, _ = make_gpt()
    part, _ = split(module)[0]
    with pytest.raises(RuntimeError, match=r"is split over pipeline stages.*load a checkpoint into a new module"):
        call(part)


def test_second_run_finds_the_skeleton_of_the_first():
    module, _ = make_gpt()
    part, skeleton = split(module)[0]
    assert Skeleton.of(part) is skeleton
    assert Skeleton.of(module) is None
