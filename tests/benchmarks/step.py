"""Time clip + step, compared with torch's recipe and with the bare optimizer, as ratios within one run.

    python tests/benchmarks/step.py [--seconds 20]

Rounds of all contenders are interleaved, so that other load affects all of them. Each row is the median over the rounds of
(contender / bare) in the same round. On one CPU thread it is CPU time, which is independent of other load; else wall time.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from meshstep.amp import Bf16, NaiveFp16
from meshstep.amp.modes import Precision
from meshstep.optim import ParallelOptimizer, clip_grad_norm_
from meshstep.parallel import ProcessGroupRegistry, Topology
from stepped_sizes import transformer_parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

Step = Callable[[], object]
MakeParams = Callable[[], list[nn.Parameter]]


def tiny_parameters(device: torch.device, count: int = 1000) -> list[nn.Parameter]:
    """Return ``count`` parameters of 64 elements."""
    return [nn.Parameter(torch.randn(64, device=device)) for _ in range(count)]


def fused_adamw(params: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return fused AdamW over ``params``, which get random gradients."""
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def alone() -> ProcessGroupRegistry:
    """Return the registry of one process."""
    return ProcessGroupRegistry(Topology())


def full_precision(make: MakeParams) -> dict[str, Step]:
    """Return the contenders in float32 by name: functions that make one step, each on its own parameters and gradients."""
    torch_params = make()
    torch_adamw = fused_adamw(torch_params)

    def torch_recipe() -> None:
        nn.utils.clip_grad_norm_(torch_params, 0.7)
        torch_adamw.step()

    return {
        "bare fused AdamW": fused_adamw(make()).step,
        "torch clip_grad_norm_ + fused AdamW": torch_recipe,
        "meshstep, clipping": ParallelOptimizer(fused_adamw(make()), alone(), max_norm=0.7).step,
        "meshstep, measuring only": ParallelOptimizer(fused_adamw(make()), alone()).step,
    }


def mixed_precision(make: MakeParams) -> dict[str, Step]:
    """Return the contenders in mixed precision by name, with masters and clipping.

    Each makes one step from half-precision gradients to half-precision weights.
    """
    steps: dict[str, Step] = {"bare fused fp32 AdamW": fused_adamw(make()).step}
    modes: dict[str, tuple[type[Bf16] | type[NaiveFp16], torch.dtype]] = {
        "bf16": (Bf16, torch.bfloat16),
        "fp16_naive": (NaiveFp16, torch.float16),
    }
    for name, (mode, dtype) in modes.items():
        steps[f"{name}, classic chain"] = classic_chain(make, dtype)
        steps[f"{name}, main_grads=False"] = with_masters(make, dtype, mode(main_grads=False))
        steps[f"{name}, from main grads"] = with_masters(make, dtype, mode())
        steps[f"{name}, the cast to main grads too"] = with_masters(make, dtype, mode(), cast=True)
    steps["bf16, split masters, from main grads"] = with_masters(make, torch.bfloat16, Bf16(split_masters=True))
    return steps


def classic_chain(make: MakeParams, dtype: torch.dtype) -> Step:
    """Return a step of separate passes: copy to float32, check and unscale (fp16), norm, clip, step, copy back."""
    masters = make()
    optimizer = fused_adamw(masters)
    params = [master.detach().to(dtype) for master in masters]
    half_grads = [torch.randn_like(param) for param in params]
    scale = torch.tensor(2.0, device=params[0].device)
    found_inf = torch.zeros((), device=params[0].device)

    @torch.no_grad()
    def step() -> None:
        grads = [master.grad for master in masters if master.grad is not None]
        torch._foreach_copy_(grads, half_grads)
        if dtype == torch.float16:
            found_inf.zero_()
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, 1 / scale)
            if found_inf.item():
                return
        nn.utils.clip_grad_norm_(masters, 0.7)
        optimizer.step()
        torch._foreach_copy_(params, [master.detach() for master in masters])

    return step


def with_masters(make: MakeParams, dtype: torch.dtype, precision: Precision, cast: bool = False) -> Step:
    """Return a mixed precision step of `ParallelOptimizer`.

    Args:
        cast: Include the cast to float32 main gradients, which autograd otherwise does in backward.
    """
    params = [nn.Parameter(param.detach().to(dtype)) for param in make()]
    optimizer = ParallelOptimizer(
        torch.optim.AdamW(params, lr=1e-4, fused=True), alone(), max_norm=0.7, precision=precision
    )
    half_grads = [torch.randn_like(param) for param in params]
    for param, half in zip(params, half_grads, strict=True):
        param.grad = half.float() if precision.main_grads else half

    @torch.no_grad()
    def step() -> None:
        if cast:
            torch._foreach_copy_([param.grad for param in params if param.grad is not None], half_grads)
        optimizer.scale_loss(torch.zeros(()))  # as backward does
        optimizer.step()

    return step


def norm_of_dtensors(make: MakeParams) -> dict[str, Step]:
    """Return functions by name that measure and clip gradients of DTensors, and of plain tensors with equal shapes."""
    from torch.distributed.tensor import DTensor, Shard

    registry = alone()
    mesh = init_device_mesh(make()[0].device.type, (1,), mesh_dim_names=("tensor",))

    def split() -> list[nn.Parameter]:
        params = [
            nn.Parameter(DTensor.from_local(param.detach(), mesh, [Shard(0)], run_check=False)) for param in make()
        ]
        fused_adamw(params)
        return params

    plain, ours, torchs = make(), split(), split()
    fused_adamw(plain)
    of_mesh = ProcessGroupRegistry(Topology(tensor=1))
    return {
        "torch clip_grad_norm_ of DTensors": lambda: nn.utils.clip_grad_norm_(torchs, 0.7),
        "meshstep clip_grad_norm_ of DTensors": lambda: clip_grad_norm_(ours, 0.7, of_mesh),
        "meshstep clip_grad_norm_, plain": lambda: clip_grad_norm_(plain, 0.7, registry),
    }


def time_rounds(
    steps: dict[str, Step], seconds: float, synchronize: Callable[[], object], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return seconds of each contender in each round after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while not next(iter(times.values())) or time.perf_counter() < end:
        for name, step in steps.items():
            synchronize()
            start = clock()
            step()
            synchronize()
            times[name].append(clock() - start)
    return times


def report(title: str, times: dict[str, list[float]]) -> None:
    """Print one row per contender: median milliseconds, and median ratio to the first contender."""
    base = next(iter(times.values()))
    print(f"\n{title} ({len(base)} rounds)")
    for name, values in times.items():
        ratio = median(value / reference for value, reference in zip(values, base, strict=True))
        print(f"  {name:40s} {median(values) * 1e3:9.2f} ms   {ratio:5.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each table")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads on a CPU")
    parser.add_argument("--width", type=int, default=512, help="of the transformer: 512 has 30M parameters")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    hardware = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {arguments.threads} threads"
    )
    print(f"torch {torch.__version__}, {hardware}")
    clock = time.process_time if device.type == "cpu" and arguments.threads == 1 else time.perf_counter
    big: MakeParams = lambda: transformer_parameters(device, arguments.width)  # noqa: E731
    tiny: MakeParams = lambda: tiny_parameters(device)  # noqa: E731
    transformer = f"{sum(param.numel() for param in big()) / 1e6:.0f}M-parameter transformer"
    tables: list[tuple[str, MakeParams, Callable[[MakeParams], dict[str, Step]]]] = [
        (f"fp32, {transformer}", big, full_precision),
        ("fp32, 1,000 parameters of 64 elements", tiny, full_precision),
        (f"masters and clipping, {transformer}", big, mixed_precision),
        ("the norm alone, 1,000 parameters of 64 elements", tiny, norm_of_dtensors),
    ]
    # One process is enough, because DTensors cost Python time, not network time.
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    for title, make, contenders in tables:
        report(title, time_rounds(contenders(make), arguments.seconds, synchronize, clock))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
