"""Time clip + step, compared with torch's recipe and with the bare optimizer, as ratios within one run.

    python tests/benchmarks/step.py [--seconds 20]

Rounds of all contenders are interleaved, so that other load affects all of them. Each row is the median over the rounds of
(contender / first row) in the same round. On one CPU thread it is CPU time, which is independent of other load; else wall
time. The last table compares norms of DTensors instead of steps.

The last column of the other tables is the share of the memory bandwidth: the least bytes that such a step must read and
write, divided by the time, relative to a multiplication of the parameters in place in the same rounds, which reads and
writes each element once. (A copy would be a wrong reference: before a CPU writes to memory that is not in its cache, it
reads it.) AdamW reads each gradient, and reads and writes the parameter and two states: 28 bytes per float32 element. The
norm, which must be known first, reads the gradient once more.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from meshstep.amp import Bf16, NaiveFp16
from meshstep.amp.modes import Precision
from meshstep.optim import ParallelOptimizer, clip_grad_norm_
from meshstep.optim.kernels.choice import chosen
from meshstep.parallel import ProcessGroupRegistry, Topology
from stepped_sizes import transformer_parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

Step = Callable[[], object]
MakeParams = Callable[[], list[nn.Parameter]]
SCALED = "parameters times a number, in place"


class Contender(NamedTuple):
    """A function that makes one step, and the least bytes per element that such a step reads and writes; 0: not known."""

    step: Step
    least_bytes: int = 0


def scaled(make: MakeParams) -> Contender:
    """Return the multiplication of all parameters by 1, in place."""
    tensors = [param.detach() for param in make()]
    return Contender(lambda: torch._foreach_mul_(tensors, 1.0), 8)


def processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def tiny_parameters(device: torch.device, count: int = 1000) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(64, device=device)) for _ in range(count)]


def fused_adamw(params: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return fused AdamW over ``params``, which get random gradients."""
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def alone() -> ProcessGroupRegistry:
    return ProcessGroupRegistry(Topology())


def full_precision(make: MakeParams) -> dict[str, Contender]:
    """Return the contenders in float32 by name, each on its own parameters and gradients."""
    torch_params = make()
    torch_adamw = fused_adamw(torch_params)

    def torch_recipe() -> None:
        nn.utils.clip_grad_norm_(torch_params, 0.7)
        torch_adamw.step()

    return {
        "bare fused AdamW": Contender(fused_adamw(make()).step, 28),
        "torch clip_grad_norm_ + fused AdamW": Contender(torch_recipe, 32),
        "meshstep, clipping": Contender(ParallelOptimizer(fused_adamw(make()), alone(), max_norm=0.7).step, 32),
        "meshstep, measuring only": Contender(ParallelOptimizer(fused_adamw(make()), alone()).step, 32),
        SCALED: scaled(make),
    }


def mixed_precision(make: MakeParams) -> dict[str, Contender]:
    """Return the contenders by name: the bare float32 optimizer, steps with masters and clipping, and `SCALED`.

    The least bytes of a step with masters are 24 for master weights and states, 2 for the half-precision weight (0 with
    split masters), twice the size of the gradient, and 6 for the cast of the gradient if it is included.
    """
    steps = {"bare fused fp32 AdamW": Contender(fused_adamw(make()).step, 28)}
    modes: dict[str, tuple[type[Bf16] | type[NaiveFp16], torch.dtype]] = {
        "bf16": (Bf16, torch.bfloat16),
        "fp16_naive": (NaiveFp16, torch.float16),
    }
    for name, (mode, dtype) in modes.items():
        steps[f"{name}, classic chain"] = Contender(classic_chain(make, dtype), 30)
        steps[f"{name}, main_grads=False"] = Contender(with_masters(make, dtype, mode(main_grads=False)), 30)
        steps[f"{name}, from main grads"] = Contender(with_masters(make, dtype, mode()), 34)
        steps[f"{name}, the cast to main grads too"] = Contender(with_masters(make, dtype, mode(), cast=True), 40)
    split = with_masters(make, torch.bfloat16, Bf16(split_masters=True))
    return {**steps, "bf16, split masters, from main grads": Contender(split, 32), SCALED: scaled(make)}


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

    ``cast``: include the cast to float32 main gradients, which autograd otherwise does in backward.
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
        optimizer.scale_loss(torch.zeros(()))  # counts a micro-batch, as backward does
        optimizer.step()

    return step


def norm_of_dtensors(make: MakeParams) -> dict[str, Contender]:
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
        "torch clip_grad_norm_ of DTensors": Contender(lambda: nn.utils.clip_grad_norm_(torchs, 0.7)),
        "meshstep clip_grad_norm_ of DTensors": Contender(lambda: clip_grad_norm_(ours, 0.7, of_mesh)),
        "meshstep clip_grad_norm_, plain": Contender(lambda: clip_grad_norm_(plain, 0.7, registry)),
    }


def time_rounds(
    contenders: dict[str, Contender], seconds: float, synchronize: Callable[[], object], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return seconds of each contender in each round after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.step()
    end = time.perf_counter() + seconds
    while not next(iter(times.values())) or time.perf_counter() < end:
        for name, contender in contenders.items():
            synchronize()
            start = clock()
            contender.step()
            synchronize()
            times[name].append(clock() - start)
    return times


def report(title: str, contenders: dict[str, Contender], times: dict[str, list[float]]) -> None:
    """Print one row per contender: median milliseconds, ratio to the first contender, and share of the bandwidth.

    The share is relative to the bandwidth that `SCALED` reaches. It is left out if `SCALED` was not measured.
    """
    base, reference = next(iter(times.values())), times.get(SCALED)
    print(f"\n{title} ({len(base)} rounds)")
    for name, values in times.items():
        ratio = median(value / bare for value, bare in zip(values, base, strict=True))
        share = ""
        if reference is not None:
            bytes_ratio = contenders[name].least_bytes / contenders[SCALED].least_bytes
            found = median(bytes_ratio * time_of / value for value, time_of in zip(values, reference, strict=True))
            share = f"   {found:5.0%} of bandwidth"
        print(f"  {name:40s} {median(values) * 1e3:9.2f} ms   {ratio:5.2f}x{share}")


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
        else f"{processor()}, {'torch' if chosen.native is None else chosen.native.variant} kernels, "
        f"{arguments.threads} threads"
    )
    print(f"torch {torch.__version__}, {hardware}")
    clock = time.process_time if device.type == "cpu" and arguments.threads == 1 else time.perf_counter
    big: MakeParams = lambda: transformer_parameters(device, arguments.width)  # noqa: E731
    tiny: MakeParams = lambda: tiny_parameters(device)  # noqa: E731
    transformer = f"{sum(param.numel() for param in big()) / 1e6:.0f}M-parameter transformer"
    tables: list[tuple[str, MakeParams, Callable[[MakeParams], dict[str, Contender]]]] = [
        (f"fp32, {transformer}", big, full_precision),
        ("fp32, 1,000 parameters of 64 elements", tiny, full_precision),
        (f"masters and clipping, {transformer}", big, mixed_precision),
        ("the norm alone, 1,000 parameters of 64 elements", tiny, norm_of_dtensors),
    ]
    # One process is enough, because DTensors cost Python time, not network time.
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    for title, make, contenders_of in tables:
        contenders = contenders_of(make)
        report(title, contenders, time_rounds(contenders, arguments.seconds, synchronize, clock))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
