"""Time steps on a GPU and count kernel launches: meshstep, also with torch's kernels and in a CUDA graph, and its peers.

    python tests/benchmarks/gpu.py [--quick]

It needs no installation, and prints tables in Markdown: clip + step in float32 and bfloat16, norms, Muon, offloaded
states, and gradient buckets of two ranks without communication. Peers are torch and, if they are installed, the fused
Adam of Transformer Engine, which Megatron uses, of Apex, and of DeepSpeed if it is already compiled. Rounds of all
contenders of a table are interleaved. Times are medians over the rounds, measured by GPU events. The host's time is the
time until the call returns. GB/s counts the minimum of bytes: reading the gradients for the norm (except for the bare
update) and for the update, reading and writing weights and moments, and writing half-precision weights. The table also
has the share of the bandwidth of a plain copy on the device.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType

ROOT = Path(__file__).resolve().parents[2]
Step = Callable[[], object]
WITHOUT_GPU = 2  # exit status without a GPU
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Contender:
    """One way to step. ``nbytes`` is the minimum of bytes to move per element. None: GB/s are not shown."""

    step: Step
    nbytes: float | None


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW over parameters with random gradients. Its learning rate is a tensor, as graphs need."""
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=torch.tensor(1e-4, device=params[0].device), fused=True)


Ways = dict[str, Callable[[], Contender]]
"""Functions that make contenders, by name. Times of other contenders are relative to the first one."""


def made(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02) for shape in shapes]


def ours(inner: torch.optim.Optimizer, **options: Any) -> Any:
    """Return a `ParallelOptimizer` on one rank, which clips to 0.7. Its parameters get random gradients."""
    from meshstep.optim import ParallelOptimizer
    from meshstep.parallel import ProcessGroupRegistry, Topology

    params = [param for group in inner.param_groups for param in group["params"]]
    optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), max_norm=0.7, **options)
    for param in params:
        param.grad = torch.randn_like(param, dtype=getattr(param, "grad_dtype", None) or param.dtype)
    return optimizer


def clip_and_step(shapes: list[tuple[int, ...]], precision: str, device: torch.device, triton: bool) -> Ways:
    """Return functions that make contenders: AdamW without clipping as the reference, and ways to clip and step."""
    from meshstep.amp import Bf16

    masters = precision == "bf16"
    dtype = torch.bfloat16 if masters else torch.float32
    extra = 2 if masters else 0  # weights that are written in half precision

    def own(precision: Any = precision) -> Step:
        params = made(shapes, dtype, device)
        rate = torch.tensor(1e-4, device=device)
        return ours(torch.optim.AdamW(params, lr=rate, fused=True), precision=precision).step  # type: ignore[no-any-return]

    def recipe(fused: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Contender:
        plain = made(shapes, torch.float32, device)
        halves = [param.detach().to(dtype) for param in plain]
        inner = fused(plain)
        for param in plain:
            param.grad = torch.randn_like(param)

        @torch.no_grad()
        def step() -> None:
            nn.utils.clip_grad_norm_(plain, 0.7)
            inner.step()
            if masters:
                torch._foreach_copy_(halves, [param.detach() for param in plain])

        return Contender(step, 32 + extra)

    cast = " + cast" if masters else ""
    found: Ways = {
        "bare fused AdamW, float32": lambda: Contender(adamw(made(shapes, torch.float32, device)).step, 28),
        f"torch: `clip_grad_norm_` + fused AdamW{cast}": lambda: recipe(adamw),
        "meshstep": lambda: Contender(own(), 32 + extra),
    }
    for name, fused in peers().items():
        found[f"torch: `clip_grad_norm_` + {name}{cast}"] = lambda fused=fused: recipe(fused)  # type: ignore[misc]
    if masters:
        rounded = Bf16(stochastic_rounding=True)
        # bfloat16 weights without masters, float32 moments, float32 gradients that are read twice
        found["meshstep, stochastic rounding"] = lambda: Contender(own(rounded), 28)
    if triton:
        found["meshstep, torch's kernels"] = lambda: Contender(by_torch(own), 32 + extra)
    if device.type == "cuda":
        found["meshstep, CUDA graph"] = lambda: Contender(captured(own()), 32 + extra)
    return found


def peers() -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    """Return fused AdamW of installed libraries. DeepSpeed's raises an error instead of compiling its kernel."""
    found: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {}
    if not torch.cuda.is_available():
        return found
    if find_spec("transformer_engine") is not None:

        def transformer_engine(params: list[nn.Parameter]) -> Any:
            from transformer_engine.pytorch.optimizers import FusedAdam

            return FusedAdam(params, lr=1e-4, adam_w_mode=True)

        found["Transformer Engine's FusedAdam"] = transformer_engine
    if find_spec("apex") is not None:

        def apex(params: list[nn.Parameter]) -> Any:
            from apex.optimizers import FusedAdam

            return FusedAdam(params, lr=1e-4, adam_w_mode=True)

        found["Apex's FusedAdam"] = apex
    if find_spec("deepspeed") is not None:

        def deepspeed(params: list[nn.Parameter]) -> Any:
            from deepspeed.git_version_info import installed_ops
            from deepspeed.ops.adam import FusedAdam

            if not installed_ops.get("fused_adam"):
                raise RuntimeError("DeepSpeed's fused_adam is not compiled")
            return FusedAdam(params, lr=1e-4, adam_w_mode=True)

        found["DeepSpeed's FusedAdam"] = deepspeed
    return found


def norms(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, triton: bool) -> Ways:
    from meshstep.optim.norm.powers import local_powers

    gradients = [param.detach() for param in made(shapes, dtype, device)]

    def total() -> Tensor:
        return nn.utils.get_total_norm(gradients)

    def own() -> Tensor:
        return local_powers(gradients, 2.0)

    found: Ways = {
        "torch: `get_total_norm`": lambda: Contender(total, dtype.itemsize),
        "meshstep: squares in float64": lambda: Contender(own, dtype.itemsize),
    }
    if triton:
        found["meshstep, torch's kernels"] = lambda: Contender(by_torch(lambda: own), dtype.itemsize)
    return found


def muons(shapes: list[tuple[int, ...]], device: torch.device) -> Ways:
    from meshstep.optim import Muon

    matrices: list[tuple[int, ...]] = [shape for shape in shapes if len(shape) == 2]

    def torchs() -> Contender:
        params = made(matrices, torch.float32, device)
        for param in params:
            param.grad = torch.randn_like(param)
        return Contender(torch.optim.Muon(params, lr=1e-3).step, None)

    return {
        "`torch.optim.Muon`, without clipping": torchs,
        "meshstep's Muon": lambda: Contender(ours(Muon(made(matrices, torch.float32, device), lr=1e-3)).step, None),
    }


def offloads(shapes: list[tuple[int, ...]], device: torch.device) -> Ways:
    from meshstep.optim import Offloaded

    def way(fraction: float) -> Contender:
        inner = torch.optim.AdamW(made(shapes, torch.float32, device), lr=1e-4, fused=True)
        return Contender(ours(inner, states=Offloaded(fraction)).step, 32)

    return {
        "meshstep, states on the GPU": lambda: way(0.0),
        "meshstep, half of the states offloaded": lambda: way(0.5),
        "meshstep, all states offloaded": lambda: way(1.0),
    }


def bucketed(width: int, depth: int, device: torch.device) -> Ways:
    """Return contenders for backward + step of one of two ranks, whose collectives return without communication."""
    from meshstep.optim import ParallelOptimizer, Sharded
    from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare

    def model_of() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(depth)))

    inputs = torch.randn(64, width, device=device)

    def alone() -> Contender:
        model = model_of()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            inner.zero_grad()
            model(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            inner.step()

        return Contender(step, None)

    def way(**options: Any) -> Contender:
        model = model_of()
        declare(model, {"*": P()})
        registry = ProcessGroupRegistry(Topology(data=2))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        optimizer = ParallelOptimizer(inner, registry, max_norm=0.7, check_replicas=False, **options)

        def step() -> None:
            optimizer.zero_grad()
            optimizer.backward(model(inputs).square().mean())
            optimizer.step()

        return Contender(step, None)

    return {
        "torch on one rank": alone,
        "two ranks": way,
        "two ranks, overlap": lambda: way(overlap=True),
        "two ranks, ZeRO-1": lambda: way(states=Sharded("data")),
        "two ranks, ZeRO-2": lambda: way(states=Sharded("data", gradients=True)),
    }


@contextmanager
def two_ranks_without_communication() -> Iterator[None]:
    """Join a world of two ranks whose collectives return at once, without a result of the other rank."""
    from gathered_objects import objects_gathered_by, said_by_all
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with objects_gathered_by(said_by_all):  # object collectives would need objects of the other rank
            yield
    finally:
        dist.destroy_process_group()


def by_torch(make: Callable[[], Step]) -> Step:
    """Return the step that ``make`` returns, made and run with ``use_kernels("torch")``."""
    from meshstep.optim import use_kernels

    @contextmanager
    def torchs() -> Iterator[None]:
        use_kernels("torch")
        try:
            yield
        finally:
            use_kernels("auto")

    with torchs():
        step = make()

    def stepped() -> None:
        with torchs():
            step()

    return stepped


def captured(step: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(keeps_alive: Step = step) -> None:  # the graph reads the memory of the optimizer's tensors
        graph.replay()

    return replay


# Measuring ------------------------------------------------------------------------------------------------------------


def seconds(step: Step, device: torch.device, times: int) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def launches(step: Step, device: torch.device) -> int | None:
    """Count kernels, copies and fills on the GPU in one step, by torch's profiler. Return None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() or () if event.device_type == DeviceType.CUDA]
    return sum(not event.is_user_annotation for event in on_gpu)  # without the spans of record_function


def host_seconds(step: Step, device: torch.device, times: int) -> float:
    """Return the median of the seconds until the call of a step returns, with an idle GPU before the call."""
    found = []
    for _ in range(times):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return median(found)


def copy_rate(device: torch.device, nbytes: int, times: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source: Tensor = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    rates = [2 * source.nbytes / seconds(lambda: target.copy_(source), device, times) for _ in range(5)]
    return median(rates)


def table(
    title: str, ways: Ways, numel: int, device: torch.device, rounds: int, copy: float, seconds_of_a_table: float
) -> str:
    """Return a table with one row per contender. A contender that raises an error has a row with the error."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    running, errors = dict[str, Contender](), dict[str, str]()

    def attempt(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            running.pop(name, None)
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")[:120]

    def begin(name: str) -> None:
        way = ways[name]()
        seconds(way.step, device, 3)
        running[name] = way

    for name in ways:
        attempt(name, lambda name=name: begin(name))  # type: ignore[misc]
    times = 10 if device.type == "cuda" else 1
    start = time.perf_counter()
    for index in range(rounds):
        if index >= LEAST_ROUNDS and time.perf_counter() - start > seconds_of_a_table:
            break
        for name, way in [*running.items()]:
            attempt(name, lambda name=name, way=way: measured[name].append(seconds(way.step, device, times)))  # type: ignore[misc]
    rows = [
        f"| {title} | ms | of the first | launches | host, ms | GB/s | of a copy |",
        "|---|---|---|---|---|---|---|",
    ]
    first = next((median(measured[name]) for name in running), 1.0)
    for name in ways:
        if name in running:
            way, took = running[name], median(measured[name])
            count, host = launches(way.step, device), host_seconds(way.step, device, times)
            rate = None if way.nbytes is None else way.nbytes * numel / took
            shown = ["-" if count is None else str(count), f"{host * 1e3:.3f}"]
            shown += ["-", "-"] if rate is None else [f"{rate / 1e9:.0f}", f"{rate / copy:.0%}"]
            rows.append(f"| {name} | {took * 1e3:.3f} | {took / first:.2f} | {' | '.join(shown)} |")
        else:
            rows.append(f"| {name} | {errors[name]} | - | - | - | - | - |")
    return "\n".join(rows)


def transformer(width: int, depth: int, vocab: int) -> list[tuple[int, ...]]:
    block = [(width,)] * 2 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,)] * 2 + [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocab, width), (width, width), *block * depth, (width,), (width,)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "1,000 parameters of 64 elements": [(64,)] * 1000,
    "30M-parameter transformer": transformer(512, 9, 3072),
    "350M-parameter transformer": transformer(1024, 24, 50_304),
}


def hardware(device: torch.device) -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type != "cuda":
        return f"{platform.machine()} CPU, {versions}"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB, CUDA {torch.version.cuda}, {versions}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this file, without a graph"
    )
    parser.add_argument("--no-triton", action="store_true", help="use torch's kernels only")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="after this time, a table gets no rounds beyond five (default: 8)"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this needs a GPU, and torch finds none; --device cpu --quick tries the file itself", file=sys.stderr)
        return WITHOUT_GPU
    device, rounds = torch.device(options.device), 3 if options.quick else 30
    models = MODELS
    if options.quick:
        models = {"100 parameters of 64 elements": [(64,)] * 100, "a transformer's layer": transformer(128, 1, 512)}
    copy = copy_rate(device, 2**22 if options.quick else 2**30, 10)
    print(f"{hardware(device)}; a copy on the device moves {copy / 1e9:.0f} GB/s (read and written)")
    from meshstep.optim.kernels.choice import VARIABLE, kernels_on_gpu

    if options.no_triton:
        os.environ[VARIABLE] = "torch"
    triton = device.type == "cuda" and kernels_on_gpu(torch.device("cuda", torch.cuda.current_device())) == "triton"

    def show(title: str, ways: Ways, shapes: list[tuple[int, ...]], rounds: int) -> None:
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        print("\n" + table(title, ways, numel, device, rounds, copy, options.seconds), flush=True)
        gc.collect()

    for precision in ("fp32", "bf16"):
        for name, shapes in models.items():
            show(f"{name}, {precision}", clip_and_step(shapes, precision, device, triton), shapes, rounds)
    middle, shapes = [*models.items()][1]
    for dtype in (torch.float32, torch.bfloat16):
        show(f"norm, {middle}, {dtype}", norms(shapes, dtype, device, triton), shapes, rounds)
    few = min(rounds, 5)
    show(f"Muon, {middle}", muons(shapes, device), shapes, few)
    show(f"clip + AdamW, {middle}", offloads(shapes, device), shapes, few)
    width, depth = (64, 4) if options.quick else (2048, 8)
    with two_ranks_without_communication():
        show("backward + clip + AdamW", bucketed(width, depth, device), [(width, width), (width,)] * depth, few)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.gpu.__main__ import make_importable

    with TemporaryDirectory() as folder:
        make_importable(Path(folder))
        sys.exit(main())
