"""The steps of the neighbours' optimizers beside meshstep's, in one interleaved run: same shapes and gradients every round.

    python tests/benchmarks/peers.py [--seconds 30] [--svg peers.svg]

Needs the extra ``interop`` (and megatron-core, without what it asks for). What is timed begins where backward has left its
gradients, in the place where each expects them, and ends when the next forward may begin: norm, clip, update, masters,
copies back. Each row is the median over rounds of (contender / bare fused float32 AdamW of torch) in the same round. On one
CPU thread it is the process's own time, to which other work on the machine adds nothing; else the wall clock.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from deepspeed_on_cpu import deepspeed_on_cpu
from megatron_on_cpu import megatron
from meshstep.amp import Bf16, NaiveFp16
from meshstep.amp.precision import Precision
from meshstep.optim import ParallelOptimizer, use_kernels
from meshstep.optim.kernels.choice import Kernels
from meshstep.parallel import ProcessGroupRegistry, Topology
from stepped_sizes import transformer_parameters
from torch import Tensor, nn

LR, MAX_NORM = 1e-4, 0.7
CPU = torch.device("cpu")


@dataclass
class Contender:
    """One way to step.

    Args:
        refill: Puts the gradients there, as its backward does; not timed.
        step: All that follows; timed.
    """

    refill: Callable[[], object]
    step: Callable[[], object]


class Layer(nn.Module):
    """So many parameters, whose gradients are given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList([nn.Parameter(p.detach().to(dtype)) for p in transformer_parameters(CPU)])
        self.gradients = [torch.randn_like(weight) for weight in self.weights]

    def forward(self) -> Tensor:
        return Given.apply(self.gradients, *self.weights)  # type: ignore[no-any-return]


class Given(torch.autograd.Function):
    """A loss of zero, with these gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(gradient.clone() for gradient in ctx.gradients))


def adamw(params: Any, fused: bool = True) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, fused=fused)


def refilled(
    weights: nn.ParameterList, gradients: list[Tensor], dtype: torch.dtype | None = None
) -> Callable[[], object]:
    def refill() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.to(dtype or gradient.dtype, copy=True)

    return refill


# The contenders -------------------------------------------------------------------------------------------------------


def bare() -> Contender:
    layer = Layer(torch.float32)
    return Contender(refilled(layer.weights, layer.gradients), adamw(layer.weights).step)


def torchs() -> Contender:
    layer = Layer(torch.float32)
    optimizer = adamw(layer.weights)

    def step() -> None:
        nn.utils.clip_grad_norm_(layer.weights, MAX_NORM)
        optimizer.step()

    return Contender(refilled(layer.weights, layer.gradients), step)


def plain_chain(dtype: torch.dtype) -> Contender:
    """Masters by hand: cast the gradients, check and unscale them, measure, clip, step, copy back."""
    layer, masters = Layer(dtype), Layer(torch.float32)
    optimizer = adamw(masters.weights)
    scale, found_inf = torch.tensor(2.0), torch.zeros(())

    @torch.no_grad()
    def step() -> None:
        for weight, master in zip(layer.weights, masters.weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        if dtype == torch.float16:
            grads = [master.grad for master in masters.weights if master.grad is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf.zero_(), 1 / scale)
            if found_inf.item():
                return
        nn.utils.clip_grad_norm_(masters.weights, MAX_NORM)
        optimizer.step()
        torch._foreach_copy_([*layer.weights], [master.detach() for master in masters.weights])

    return Contender(refilled(layer.weights, layer.gradients), step)


def meshsteps(dtype: torch.dtype, precision: Precision | str = "fp32", kernels: Kernels = "auto") -> Contender:
    layer = Layer(dtype)
    optimizer: Any = ParallelOptimizer(
        adamw(layer.weights),
        ProcessGroupRegistry(Topology()),
        max_norm=MAX_NORM,
        precision=precision,  # type: ignore[arg-type]
    )
    wide = isinstance(precision, Precision) and precision.main_grads
    refill = refilled(layer.weights, layer.gradients, torch.float32 if wide else None)

    def step() -> None:
        use_kernels(kernels)
        optimizer.scale_loss(torch.zeros(()))  # as a backward of others would
        optimizer.step()

    def afresh() -> None:
        optimizer.zero_grad()
        refill()

    return Contender(afresh, step)


def megatrons(dtype: torch.dtype) -> Contender:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    layer = Layer(dtype)
    for weight in layer.weights:
        weight.tensor_model_parallel = False
    config: Any = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        clip_grad=MAX_NORM,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=False,
    )
    if dtype == torch.float32:
        optimizer: Any = FP32Optimizer(adamw(layer.weights), config, lambda *_: None)
    else:
        scaler = ConstantGradScaler(2.0) if dtype == torch.float16 else None
        optimizer = Float16OptimizerWithFloat16Params(adamw(layer.weights), config, scaler, lambda *_: None)

    def refill() -> None:
        for weight, gradient in zip(layer.weights, layer.gradients, strict=True):  # where its DDP puts them
            weight.main_grad = gradient.to(torch.float32, copy=True)

    return Contender(refill, optimizer.step)


def deepspeeds(package: Any, dtype: torch.dtype) -> Contender:
    layer = Layer(dtype)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": MAX_NORM}
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if dtype == torch.float16:
        config["fp16"] = {"enabled": True, "loss_scale": 2.0}
    made = package.initialize(model=layer, optimizer=adamw(layer.weights), config=config, dist_init_required=False)
    engine = made[0]
    return Contender(lambda: engine.backward(engine()), engine.step)


def cpu_adams(package: Any) -> Contender:
    """DeepSpeed's kernel for offloaded states, alone: no norm, no clip."""
    layer = Layer(torch.float32)
    optimizer = package.ops.adam.DeepSpeedCPUAdam(list(layer.weights), lr=LR)
    return Contender(refilled(layer.weights, layer.gradients), optimizer.step)


def contenders(package: Any) -> Mapping[str, Mapping[str, Callable[[], Contender]]]:
    """By precision. The first of all is what the others are measured by."""
    half: dict[str, dict[str, Callable[[], Contender]]] = {}
    for dtype, mode, name in (
        (torch.bfloat16, Bf16, "bf16, float32 masters"),
        (torch.float16, NaiveFp16, "fp16, float32 masters"),
    ):
        half[name] = {
            "plain chain": lambda dtype=dtype: plain_chain(dtype),  # type: ignore[misc]
            "Megatron-core": lambda dtype=dtype: megatrons(dtype),  # type: ignore[misc]
            "DeepSpeed": lambda dtype=dtype: deepspeeds(package, dtype),  # type: ignore[misc]
            "meshstep, torch's kernels": lambda dtype=dtype, mode=mode: meshsteps(dtype, mode(), "torch"),  # type: ignore[misc]
            "meshstep": lambda dtype=dtype, mode=mode: meshsteps(dtype, mode()),  # type: ignore[misc]
            "meshstep, main_grads=False": lambda dtype=dtype, mode=mode: meshsteps(dtype, mode(main_grads=False)),  # type: ignore[misc]
        }
    return {
        "fp32": {
            "bare fused AdamW": bare,
            "torch": torchs,
            "Megatron-core": lambda: megatrons(torch.float32),
            "DeepSpeed": lambda: deepspeeds(package, torch.float32),
            "DeepSpeed CPUAdam, alone": lambda: cpu_adams(package),
            "meshstep, torch's kernels": lambda: meshsteps(torch.float32, kernels="torch"),
            "meshstep": lambda: meshsteps(torch.float32),
        },
        **half,
    }


# Timing ---------------------------------------------------------------------------------------------------------------


def rounds(of: Mapping[str, Contender], seconds: float, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each in each round, after one of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in of}
    end = time.perf_counter() + seconds
    while len(next(iter(times.values()))) < 4 or time.perf_counter() < end:
        for name, contender in of.items():
            contender.refill()
            start = clock()
            contender.step()
            times[name].append(clock() - start)
    return {name: values[1:] for name, values in times.items()}


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    return {
        name: median(mine / bare for mine, bare in zip(values, times[base], strict=True))
        for name, values in times.items()
    }


def bars(title: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """The ratios as bars, an SVG."""
    row, left, width, top = 22, 250, 430, 34
    rows = [(precision, name, value) for precision, of in found.items() for name, value in of.items()]
    most, lines, y, before = max(value for *_, value in rows), list[str](), top, ""
    for precision, name, value in rows:
        if precision != before:
            y += 8 + row * bool(before)
            lines.append(f'<text x="8" y="{y + 14}" font-weight="bold">{precision}</text>')
            before, y = precision, y + row
        colour = "#0b7285" if name.startswith("meshstep") else "#adb5bd"
        lines.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{name}</text>')
        lines.append(
            f'<rect x="{left}" y="{y + 2}" width="{width * value / most:.0f}" height="{row - 6}" fill="{colour}"/>'
        )
        lines.append(f'<text x="{left + width * value / most + 6:.0f}" y="{y + 14}">{value:.2f}</text>')
        y += row
    size = f'width="{left + width + 60}" height="{y + 12}"'
    style = 'font-family="sans-serif" font-size="13"'
    head = f'<rect width="100%" height="100%" fill="white"/><text x="8" y="20" font-size="15">{title}</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{head}{"".join(lines)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each precision")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--svg", help="where to write the bars")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        store = Path(stack.enter_context(TemporaryDirectory()), "store")
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        package = stack.enter_context(deepspeed_on_cpu())
        package.init_distributed("gloo")
        stack.enter_context(megatron())
        for precision, makers in contenders(package).items():
            made = {name: make() for name, make in {"bare fused AdamW": bare, **makers}.items()}
            times = rounds(made, arguments.seconds, clock)
            found[precision] = ratios(times, "bare fused AdamW")
            print(f"\n{precision} ({len(times['bare fused AdamW'])} rounds)")
            for name, ratio in found[precision].items():
                print(f"  {name:32s} {median(times[name]) * 1e3:9.2f} ms   {ratio:5.2f}x")
    if arguments.svg:
        with open(arguments.svg, "w", encoding="utf-8") as file:
            file.write(bars("clip + step, as a multiple of torch's bare fused float32 AdamW", found))


if __name__ == "__main__":
    main()
