"""Print the host synchronizations and transfers of a step on a GPU per stream, counted on simulated CUDA streams.

    python tests/benchmarks/transfers.py

Each row is a step of a transformer with 28 small parameters in a single process. The offloaded ones have five buckets.
Nothing runs on a GPU; see tests/harness/stream_simulation.py.

    waits          calls for which the host waits for a GPU
    thread waits   calls for which the thread of `AsyncSaver` waits
    compute        copies to the host, and to the GPU, on the stream of the step
    down, up       copies on the other streams: to the host, and to the GPU
    pinned         allocations of pinned memory
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

import torch
from meshstep.optim import SOAP, AsyncSaver, CosineAnnealingLR, Offloaded, ParallelOptimizer, Shampoo
from meshstep.optim.states import offloaded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from set_gradients import setting_gradients
from stream_simulation import DeviceTensor, simulated_cuda
from torch import Tensor, nn

COLUMNS = ("waits", "thread waits", "compute, to the host", "compute, to the GPU", "down", "up", "pinned")
WIDTH, BUCKETS = 8, 4  # a bucket has at most a fourth of the bytes
STEPS = 5  # the last one is counted


@dataclass(frozen=True)
class Case:
    """A step to count.

    Args:
        make: Makes the wrapped optimizer.
        options: Options of `ParallelOptimizer`.
        dtype: Dtype of the parameters.
        is_saved: True: an `AsyncSaver` starts a checkpoint in each step.
        is_scheduled: True: a learning-rate schedule advances in each step.
    """

    make: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_saved: bool = False
    is_scheduled: bool = False


def fused(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


CASES: dict[str, Case] = {
    "AdamW": Case(fused),
    "AdamW, `CosineAnnealingLR`": Case(fused, is_scheduled=True),
    "AdamW, `Offloaded(1.0)`": Case(fused, {"states": Offloaded(1.0)}),
    "AdamW, `Offloaded(1.0)`, bf16": Case(fused, {"states": Offloaded(1.0), "precision": "bf16"}, torch.bfloat16),
    "AdamW, `AsyncSaver`": Case(fused, is_saved=True),
    "SOAP": Case(lambda params: SOAP(params, lr=0.01)),
    "Shampoo": Case(lambda params: Shampoo(params, lr=0.01)),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters by name."""
    found: dict[str, tuple[int, ...]] = {"wte": (4 * WIDTH, WIDTH), "wpe": (2 * WIDTH, WIDTH)}
    for layer in range(2):
        for name, shape in {
            "norm1": (WIDTH,),
            "qkv": (3 * WIDTH, WIDTH),
            "proj": (WIDTH, WIDTH),
            "norm2": (WIDTH,),
            "up": (4 * WIDTH, WIDTH),
            "down": (WIDTH, 4 * WIDTH),
        }.items():
            found |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    return found | {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}


@contextmanager
def counting(simulation: Any, device: torch.device, found: Counter[str]) -> Iterator[None]:
    """Count waits, transfers and allocations within the block."""
    copy, wait, pin, main = simulation.copy, simulation.wait, simulation.pin, threading.current_thread()

    def counted_copy(target: Tensor, source: Tensor, *args: Any) -> None:
        to_host = not isinstance(target, DeviceTensor)
        if isinstance(target, DeviceTensor) != isinstance(source, DeviceTensor):
            on_compute = simulation.current_stream(device) is simulation.default_streams[device.index]
            found[f"compute, to the {'host' if to_host else 'GPU'}" if on_compute else "down" if to_host else "up"] += 1
        copy(target, source, *args)

    def counted_wait(clock: Any) -> None:
        found["waits" if threading.current_thread() is main else "thread waits"] += 1
        wait(clock)

    def counted_pin(tensor: Tensor) -> Tensor:
        found["pinned"] += 1
        pinned: Tensor = pin(tensor)
        return pinned

    with (
        mock.patch.object(simulation, "copy", counted_copy),
        mock.patch.object(simulation, "wait", counted_wait),
        mock.patch.object(simulation, "pin", counted_pin),
    ):
        yield


def count(case: Case) -> Counter[str]:
    """Return the counts of the last of `STEPS` steps."""
    found, device = Counter[str](), torch.device("cuda", 0)
    grad_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes().values())
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(offloaded, "BUCKET_BYTES", -(-grad_bytes // BUCKETS)),
        simulated_cuda(collectives_on=torch.device("cpu")) as simulation,
    ):
        model = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape))
                for name, shape in shapes().items()
            }
        )
        for name, param in model.items():
            model[name] = nn.Parameter(param.detach().to(device, case.dtype))
        declare(model, {"*": P()})
        registry = ProcessGroupRegistry(Topology())
        optimizer = ParallelOptimizer(
            case.make([*model.named_parameters()]), registry, max_norm=1.0, check_replicas=False, **case.options
        )
        saver = AsyncSaver(folder, registry)
        schedule = CosineAnnealingLR(optimizer, 12) if case.is_scheduled else None
        for _ in range(STEPS):
            with setting_gradients(optimizer):
                for param in model.values():
                    param.grad = torch.ones_like(param, dtype=getattr(param, "grad_dtype", None) or param.dtype)
            found.clear()
            with counting(simulation, device, found):
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                if case.is_saved:
                    saver.save(model, optimizer)
                    saver._thread.submit(int).result()  # runs after the checkpoint is written
            optimizer.zero_grad()
            if case.is_saved:
                saver.wait()
        saver.close()
    return found


def row(name: str) -> list[str]:
    """Return the cells of a row of the table."""
    found = count(CASES[name])
    return [name, *(str(found[column]) for column in COLUMNS)]


def main() -> None:
    print(f"| step | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    for name in CASES:
        print(f"| {' | '.join(row(name))} |")


if __name__ == "__main__":
    main()
