"""Print the kernel launches and the memory traffic of optimizer steps on a GPU, counted on fake CUDA tensors.

    python tests/benchmarks/launches.py

Each row is a step of a transformer with 100 parameters, in a single process with clipping, in float32 or in bfloat16 for
stochastic rounding. Nothing runs on a GPU: the counts follow from the operators that the step issues.

    kernels   an estimate of the kernels that the operators launch
    bytes     bytes that all operators read and write, per element of the parameters

The first two columns of figures are for tensors that are stepped one after the other, as on a CPU; only full-tensor
optimizers have them. The last two are for tensors that are stepped together, as on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from fake_cuda import Log, fake_cuda
from meshstep.amp import Bf16
from meshstep.amp.stochastic_rounding import Drawn
from meshstep.optim import CAME, LAMB, LARS, SOAP, Adafactor, HalfStates, Muon, ParallelOptimizer, Shampoo, StableAdamW
from meshstep.optim.states import half_states, masters
from meshstep.optim.whole import batching
from meshstep.optim.whole.optimizer import StepsTaken, WholeOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from set_gradients import setting_gradients
from torch import nn

Make = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A step to count.

    ``make`` returns the optimizer of named parameters. ``triton``: a Triton kernel rounds. It cannot run on fake
    tensors, so its launches and bytes follow from the sizes of its tensors.
    """

    make: Make
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    triton: bool = False


def fused(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


ROUNDED = {"precision": Bf16(stochastic_rounding=True)}
CASES: dict[str, Case] = {
    "AdamW(fused=True)": Case(fused),
    "Muon": Case(lambda params: Muon(params, lr=0.02)),
    "LAMB": Case(LAMB),
    "LARS": Case(lambda params: LARS(params, momentum=0.9, weight_decay=0.1)),
    "StableAdamW": Case(StableAdamW),
    "Adafactor": Case(Adafactor),
    "CAME": Case(lambda params: CAME(params, lr=1e-3)),
    "SOAP": Case(SOAP),
    "Shampoo": Case(lambda params: Shampoo(params, precondition_frequency=10)),
    "AdamW, stochastic rounding": Case(fused, torch.bfloat16, ROUNDED),
    "AdamW, stochastic rounding, Triton": Case(fused, torch.bfloat16, ROUNDED, triton=True),
    "AdamW, HalfStates": Case(fused, options={"states": HalfStates()}),
    "AdamW, HalfStates, Triton": Case(fused, options={"states": HalfStates()}, triton=True),
}


def shapes_of(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a transformer's parameters by name: 12 per layer, and 4 more."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (16 * width, width), "wpe.weight": (8 * width, width)}
    for layer in range(layers):
        for name, shape in (
            ("norm1", (width,)),
            ("qkv", (3 * width, width)),
            ("proj", (width, width)),
            ("norm2", (width,)),
            ("up", (4 * width, width)),
            ("down", (width, 4 * width)),
        ):
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    return shapes | {"norm.weight": (width,), "norm.bias": (width,)}


def count(case: Case, together: bool = True, width: int = 128, layers: int = 8, steps: int = 4) -> tuple[Log, int]:
    """Return the log of the last of ``steps`` steps, and the number of elements of the parameters.

    ``together`` False: full-tensor optimizers step one tensor after the other, as on a CPU.
    """
    log, rounded = Log(), list[int]()

    def round_by_triton(everything: Sequence[Drawn]) -> list[Drawn]:
        pairs = [pair for drawn in everything for pair in drawn.pairs]
        rounded.append(sum(target.nbytes + 4 * source.numel() for target, source in pairs))
        return []

    with ExitStack() as stack:
        logging = stack.enter_context(fake_cuda(collectives_on=torch.device("cpu")))
        # Fake tensors have no elements, so SOAP and Shampoo get the step count 5, at which they compute no new basis.
        stack.enter_context(
            mock.patch.object(StepsTaken, "of", lambda _, slots: dict.fromkeys((slot.position for slot in slots), 5))
        )
        if not together:
            stack.enter_context(mock.patch.object(batching, "batches_on", return_value=False))
        for module in (half_states, masters) if case.triton else ():
            stack.enter_context(mock.patch.object(module, "round_by_kernels", round_by_triton))
        params = {
            name: nn.Parameter(torch.ones(shape, device="cuda", dtype=case.dtype))
            for name, shape in shapes_of(width, layers).items()
        }
        optimizer = ParallelOptimizer(
            case.make(list(params.items())),
            ProcessGroupRegistry(Topology()),
            max_norm=1.0,
            check_replicas=False,
            **case.options,
        )
        for _ in range(steps):
            with setting_gradients(optimizer):
                for param in params.values():
                    param.grad = torch.ones_like(param, dtype=getattr(param, "grad_dtype", None) or param.dtype)
            rounded.clear()
            with logging(traffic=True) as log:
                optimizer.step()
            optimizer.zero_grad()
    log.launches += ["round_chunks"] * len(rounded)
    log.kernels += len(rounded)
    log.traffic += sum(rounded)
    return log, sum(param.numel() for param in params.values())


def figures(log: Log, numel: int) -> list[str]:
    return [f"{number:,.0f}" for number in (log.kernels, log.traffic / numel)]


def row(name: str, width: int = 128, layers: int = 8) -> str:
    case = CASES[name]
    cells = figures(*count(case, True, width, layers))
    is_full = issubclass(type(case.make([("w", nn.Parameter(torch.ones(2, 2)))])), WholeOptimizer)
    before = figures(*count(case, False, width, layers)) if is_full else ["", ""]
    return f"| {' | '.join([f'`{name}`', *before, *cells])} |".replace("  ", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their names")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="also print the N most frequent operators")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    print("| step | kernels, one after the other | bytes | kernels, together | bytes |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        if options.only in name:
            print(row(name, options.width, options.layers))
            log, _ = count(case, True, options.width, options.layers) if options.most else (Log(), 0)
            for operator, times in Counter(log.launches).most_common(options.most):
                print(f"    {times:6} {operator}")


if __name__ == "__main__":
    main()
