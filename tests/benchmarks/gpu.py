"""Time clip + step on a GPU and count kernel launches: meshstep, also with Triton and in a CUDA graph; torch; bare update.

    python tests/benchmarks/gpu.py [--quick]

It needs no installation, and prints tables in Markdown. Rounds of all contenders are interleaved. Times are medians over
the rounds, measured by GPU events. GB/s counts the minimum of bytes: reading the gradients for the norm (except for the
bare update) and for the update, reading and writing weights and moments, and writing half-precision weights. The table
also has the share of the bandwidth of a plain copy on the device.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

ROOT = Path(__file__).resolve().parents[2]
Step = Callable[[], object]
WITHOUT_GPU = 2  # the exit status


@dataclass(frozen=True)
class Contender:
    """One way to step.

    Args:
        step: One step.
        nbytes: Minimum of bytes to move per element.
    """

    step: Step
    nbytes: int


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make AdamW over parameters with random gradients. Its learning rate is a tensor, as graphs need."""
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=torch.tensor(1e-4, device=params[0].device), fused=True)


def contenders(shapes: list[tuple[int, ...]], precision: Any, device: torch.device) -> dict[str, Contender]:
    """Return contenders by name, each with its own weights. Ratios are relative to the first one."""
    from meshstep.optim import ParallelOptimizer
    from meshstep.parallel import ProcessGroupRegistry, Topology

    masters = precision == "bf16"
    dtype = torch.bfloat16 if masters else torch.float32
    extra = 2 if masters else 0  # weights that are written in half precision

    def made(kind: torch.dtype) -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(shape, device=device, dtype=kind) * 0.02) for shape in shapes]

    def own() -> Step:
        params = made(dtype)
        inner = torch.optim.AdamW(params, lr=torch.tensor(1e-4, device=device), fused=True)
        optimizer = ParallelOptimizer(inner, ProcessGroupRegistry(Topology()), max_norm=0.7, precision=precision)
        for param in params:
            param.grad = torch.randn_like(param, dtype=torch.float32)
        return optimizer.step

    plain = made(torch.float32)
    halves = [param.detach().to(dtype) for param in plain]
    inner = adamw(plain)

    @torch.no_grad()
    def recipe() -> None:
        nn.utils.clip_grad_norm_(plain, 0.7)
        inner.step()
        if masters:
            torch._foreach_copy_(halves, [param.detach() for param in plain])

    found = {
        "bare fused AdamW, float32": Contender(adamw(made(torch.float32)).step, 28),
        "torch: `clip_grad_norm_` + fused AdamW" + (" + cast" if masters else ""): Contender(recipe, 32 + extra),
        "meshstep": Contender(own(), 32 + extra),
    }
    if device.type == "cuda" and find_spec("triton") is not None:
        found["meshstep, Triton's kernels"] = Contender(by_triton(own()), 32 + extra)
    if device.type == "cuda":
        found["meshstep, CUDA graph"] = Contender(captured(own()), 32 + extra)
    return found


def by_triton(step: Step) -> Step:
    """Return the step, run with ``use_kernels("triton")``."""
    from meshstep.optim import use_kernels

    def stepped() -> None:
        use_kernels("triton")
        try:
            step()
        finally:
            use_kernels("auto")

    return stepped


def captured(step: Step) -> Step:
    """Return the replay of a CUDA graph of the step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# Measuring ------------------------------------------------------------------------------------------------------------


def seconds(step: Step, device: torch.device, times: int) -> float:
    """Return the mean seconds of a step."""
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


def copy_rate(device: torch.device, nbytes: int, times: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source: Tensor = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    rates = [2 * source.nbytes / seconds(lambda: target.copy_(source), device, times) for _ in range(5)]
    return median(rates)


def table(title: str, ways: dict[str, Contender], numel: int, device: torch.device, rounds: int, copy: float) -> str:
    """Return a table with one row per contender."""
    for way in ways.values():
        seconds(way.step, device, 3)
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            measured[name].append(seconds(way.step, device, 10 if device.type == "cuda" else 1))
    first = median(next(iter(measured.values())))
    rows = [f"| {title} | ms | of the first | launches | GB/s | of a copy |", "|---|---|---|---|---|---|"]
    for name, way in ways.items():
        took, count = median(measured[name]), launches(way.step, device)
        rate = way.nbytes * numel / took
        shown = "-" if count is None else str(count)
        rows.append(
            f"| {name} | {took * 1e3:.3f} | {took / first:.2f} | {shown} | {rate / 1e9:.0f} | {rate / copy:.0%} |"
        )
    return "\n".join(rows)


def transformer(width: int, depth: int, vocab: int) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a transformer."""
    block = [(width,)] * 2 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,)] * 2 + [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocab, width), (width, width), *block * depth, (width,), (width,)]


def hardware(device: torch.device) -> str:
    """Return a description of device and versions."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if device.type != "cuda":
        return f"{platform.machine()} CPU, {versions}"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB, CUDA {torch.version.cuda}, {versions}"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this file, without a graph"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this needs a GPU, and torch finds none; --device cpu --quick tries the file itself", file=sys.stderr)
        return WITHOUT_GPU
    device, rounds = torch.device(options.device), 3 if options.quick else 30
    models: dict[str, list[tuple[int, ...]]] = {
        "1,000 parameters of 64 elements": [(64,)] * 1000,
        "30M-parameter transformer": transformer(512, 9, 3072),
        "350M-parameter transformer": transformer(1024, 24, 50_304),
    }
    if options.quick:
        models = {"100 parameters of 64 elements": [(64,)] * 100, "a transformer's layer": transformer(128, 1, 512)}
    copy = copy_rate(device, 2**22 if options.quick else 2**30, 10)
    print(f"{hardware(device)}; a copy on the device moves {copy / 1e9:.0f} GB/s (read and written)")
    for precision in ("fp32", "bf16"):
        for name, shapes in models.items():
            numel = sum(torch.Size(shape).numel() for shape in shapes)
            ways = contenders(shapes, precision, device)
            print("\n" + table(f"{name}, {precision}", ways, numel, device, rounds, copy), flush=True)
            del ways
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.gpu.__main__ import make_importable

    with TemporaryDirectory() as folder:
        make_importable(Path(folder))
        sys.exit(main())
