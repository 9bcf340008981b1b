"""Times the fused kernels against PyTorch: eager, compiled by inductor, and its own fused operations.

    python benchmarks/kernels.py [--rounds 15] [--only gelu] [--keep-memory] [--inductor] [--csv kernels.csv]

Contestants of a row take turns, A B C, C B A, and so on, on one thread, so that all see the same machine; a time is the
median of its turns, of forward and backward together: on a CPU the processor's time, which neighbours disturb least, on
CUDA the clock's. x is the time of a contestant over ours: above 1 ours is faster.

By default glibc gives large tensors back to the system and maps them anew. On some machines that costs more than the
operation, and for tensors of a few MiB it hits one contestant or another by luck. With --keep-memory freed memory is
kept for the next tensor, as CUDA's allocator does, and what is left are the operations themselves.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_ptdp import kernels
from lightning_ptdp.compat.apex import FusedAdam
from lightning_ptdp.kernels.cross_entropy import cross_entropy

Step = Callable[[], object]
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Row:
    """One operation at one size. steps: name of a contestant -> one step of it; "ours" is one of them."""

    name: str
    dtype: str
    steps: dict[str, Step]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.seconds.items()}


def step_of(function: Callable[..., Tensor], *inputs: Tensor, leaves: int = 1) -> Step:
    """Forward and backward; the first `leaves` inputs get gradients."""
    parts = [x.detach().requires_grad_() if i < leaves else x for i, x in enumerate(inputs)]
    direction = torch.randn_like(function(*parts))
    return lambda: torch.autograd.grad(function(*parts), parts[:leaves], direction)


def rows(device: str, inductor: bool) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Names and makers of rows: only one row's tensors are alive at a time, and none of a row that isn't timed."""
    for dtype in DTYPES:
        for name, make in OPERATIONS.items():
            yield (
                name,
                lambda name=name, make=make, dtype=dtype: Row(name, _short(dtype), make(device, dtype, inductor)),
            )
    for what, make in {"AdamW": adam_steps, "AdamW's arithmetic": adam_kernels}.items():
        for of, sizes in {"48 tensors of 14 M": [292_000] * 48, "600 tensors of 64x64": [4096] * 600}.items():
            name = f"{what}, {of}"
            yield name, lambda name=name, make=make, sizes=sizes: Row(name, "float32", make(device, sizes))


def contestants(
    ours: Callable[..., Tensor], eager: Callable[..., Tensor], inputs: list[Tensor], leaves: int, inductor: bool
) -> dict[str, Step]:
    steps = {"ours": step_of(ours, *inputs, leaves=leaves), "eager": step_of(eager, *inputs, leaves=leaves)}
    if inductor:
        steps["inductor"] = step_of(torch.compile(eager, fullgraph=True), *inputs, leaves=leaves)
    return steps


def cross_entropy_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    logits, target = torch.randn(2048, 8192, device=device, dtype=dtype), torch.randint(0, 8192, (2048,), device=device)
    eager = lambda x, t: F.cross_entropy(x.float(), t)  # noqa: E731  how mixed precision computes it
    return contestants(cross_entropy, eager, [logits, target], 1, inductor)


def causal_softmax_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    hidden = torch.ones(1024, 1024, dtype=torch.bool, device=device).triu(1)

    def eager(x: Tensor) -> Tensor:
        return (x * 0.125).masked_fill(hidden, float("-inf")).softmax(-1)

    scores = torch.randn(8, 1024, 1024, device=device, dtype=dtype)
    return contestants(lambda x: kernels.scaled_causal_softmax(x, 0.125), eager, [scores], 1, inductor)


def masked_softmax_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    hidden = torch.rand(1, 1024, 1024, device=device) < 0.2
    return contestants(
        lambda x: kernels.scaled_masked_softmax(x, hidden, 0.125),
        lambda x: (x * 0.125).masked_fill(hidden, float("-inf")).softmax(-1),
        [torch.randn(8, 1024, 1024, device=device, dtype=dtype)],
        1,
        inductor,
    )


def attention_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    q, k, v = (torch.randn(1, 8, 1024, 64, device=device, dtype=dtype) for _ in range(3))
    hidden = torch.ones(1024, 1024, dtype=torch.bool, device=device).triu(1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.scaled_causal_softmax(q @ k.transpose(-1, -2), 0.125) @ v

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) * 0.125).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    steps = contestants(ours, eager, [q, k, v], 3, inductor)
    sdpa = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    return {**steps, "SDPA": step_of(sdpa, q, k, v, leaves=3)}


def gelu_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    inputs = [torch.randn(2048, 4096, device=device, dtype=dtype), torch.randn(4096, device=device, dtype=dtype)]
    return contestants(kernels.bias_gelu, lambda x, b: F.gelu(x + b, approximate="tanh"), inputs, 2, inductor)


def plain_gelu_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    inputs = [torch.randn(2048, 4096, device=device, dtype=dtype)]
    return contestants(kernels.bias_gelu, lambda x: F.gelu(x, approximate="tanh"), inputs, 1, inductor)


def swiglu_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    inputs = [torch.randn(2048, 4096, device=device, dtype=dtype) for _ in range(2)]
    return contestants(kernels.swiglu, lambda gate, up: F.silu(gate) * up, inputs, 2, inductor)


def layer_norm_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    inputs = [torch.randn(*shape, device=device, dtype=dtype) for shape in ((2048, 1024), (1024,), (1024,))]
    return contestants(kernels.layer_norm, lambda x, w, b: F.layer_norm(x, (1024,), w, b), inputs, 3, inductor)


def rms_norm_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    inputs = [torch.randn(*shape, device=device, dtype=dtype) for shape in ((2048, 1024), (1024,))]
    return contestants(kernels.rms_norm, lambda x, w: F.rms_norm(x, (1024,), w, 1e-6), inputs, 2, inductor)


def dropout_add_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    shapes = ((2048, 1024), (1024,), (2048, 1024))
    x, bias, residual = (torch.randn(*shape, device=device, dtype=dtype) for shape in shapes)
    return contestants(
        lambda x, b, r: kernels.bias_dropout_add(x, b, r, 0.1),
        lambda x, b, r: r + F.dropout(x + b, 0.1),
        [x, bias, residual],
        3,
        inductor,
    )


def rotary_steps(device: str, dtype: torch.dtype, inductor: bool) -> dict[str, Step]:
    x = torch.randn(2, 1024, 16, 64, device=device, dtype=dtype).transpose(1, 2)
    angles = torch.rand(1024, 32, device=device)
    cos, sin = angles.cos(), angles.sin()
    whole_cos, whole_sin = (torch.cat([part, part], -1).to(dtype) for part in (cos, sin))

    def eager(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * whole_cos + torch.cat([-high, low], -1) * whole_sin

    return contestants(lambda x: kernels.rotary_embedding(x, cos, sin), eager, [x], 1, inductor)


OPERATIONS: dict[str, Callable[[str, torch.dtype, bool], dict[str, Step]]] = {
    "cross-entropy [2048, 8192]": cross_entropy_steps,
    "causal softmax [8, 1024, 1024]": causal_softmax_steps,
    "masked softmax [8, 1024, 1024]": masked_softmax_steps,
    "causal attention [1, 8, 1024, 64]": attention_steps,
    "bias + gelu [2048, 4096]": gelu_steps,
    "gelu [2048, 4096]": plain_gelu_steps,
    "swiglu [2048, 4096]": swiglu_steps,
    "layer norm [2048, 1024]": layer_norm_steps,
    "rms norm [2048, 1024]": rms_norm_steps,
    "bias + dropout + add [2048, 1024]": dropout_add_steps,
    "rotary [2, 16, 1024, 64]": rotary_steps,
}


def adam_steps(device: str, sizes: list[int]) -> dict[str, Step]:
    """Whole steps of optimizers, without zeroing gradients."""
    steps: dict[str, Step] = {}
    for name, make in {
        "ours": FusedAdam,
        "fused": partial(torch.optim.AdamW, fused=True),
        "foreach": partial(torch.optim.AdamW, foreach=True),
    }.items():
        parameters = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        steps[name] = make(parameters, lr=1e-4, weight_decay=0.1).step
    return steps


def adam_kernels(device: str, sizes: list[int]) -> dict[str, Step]:
    """What the steps call, ours and that of AdamW(fused=True), on lists at hand; counters of steps stay as they are."""
    lists = [[torch.rand(size, device=device) for size in sizes] for _ in range(4)]
    counters = [torch.tensor(10.0, device=device) for _ in sizes]
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
    numbers = kernels.AdamStep(1e-4, (0.9, 0.95), 1e-8, 0.1, 10)
    theirs = [[tensor.clone() for tensor in each] for each in lists]
    return {
        "ours": lambda: kernels.adam_(*lists, numbers),
        "fused": lambda: torch._fused_adamw_(*theirs, [], counters, lr=1e-4, **options),
    }


def measure(row: Row, rounds: int, device: str) -> None:
    """Give every contestant its turns; the first two of each aren't counted."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    row.seconds = {name: [] for name in row.steps}
    for i in range(rounds + 2):
        for name in list(row.steps)[:: 1 if i % 2 == 0 else -1]:
            wait_for(device)
            start = clock()
            row.steps[name]()
            wait_for(device)
            if i >= 2:
                row.seconds[name].append(clock() - start)
    row.steps = {}


def keep_memory() -> None:
    """Let glibc neither map large tensors one by one nor trim its heap."""
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4  # names of malloc.h, without M_
        ctypes.CDLL(None).mallopt(trim_threshold, 2**31 - 1)
        ctypes.CDLL(None).mallopt(mmap_max, 0)


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def show(row: Row) -> str:
    medians = row.medians()
    ours = medians["ours"]
    others = "  ".join(f"{name} {time / ours:5.2f}x" for name, time in medians.items() if name != "ours")
    return f"{row.name:36} {row.dtype:9} {1000 * ours:8.2f} ms   {others}"


def write(path: Path, measured: list[Row], header: str) -> None:
    """One line a contestant, below a comment with the machine and the versions."""
    with path.open("w", newline="") as file:
        file.write(f"# {header}\n")
        table = csv.writer(file)
        table.writerow(["operation", "dtype", "contestant", "median_ms", "times_ours", "turns"])
        for row in measured:
            medians = row.medians()
            for name, seconds in medians.items():
                ratio = round(seconds / medians["ours"], 3)
                table.writerow([row.name, row.dtype, name, round(1000 * seconds, 3), ratio, len(row.seconds[name])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--inductor", action="store_true", help="also torch.compile's code, which takes minutes")
    parser.add_argument("--csv", type=Path, help="where to write the times")
    parser.add_argument("--keep-memory", action="store_true", help="keep what is freed for the next tensor")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.keep_memory:
        keep_memory()
    library = kernels.load()
    has_kernels = library.has_cuda if options.device == "cuda" else library.path is not None
    if not has_kernels:
        print(f"nothing to time, no kernels are compiled for {options.device}: {library.reason}")
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"{library.instruction_set}, one thread"
    name += ", freed memory kept" if options.keep_memory else ""
    header = f"{name}; torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}"
    print(header)
    measured = []
    for name, make in rows(options.device, options.inductor):
        if options.only in name:
            torch.manual_seed(0)
            row = make()
            measure(row, options.rounds, options.device)
            measured.append(row)
            print(show(row), flush=True)
    if options.csv:
        write(options.csv, measured, header)


if __name__ == "__main__":
    main()
