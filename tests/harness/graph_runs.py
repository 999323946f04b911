"""Train by eager steps and by replays of a graph, on any device; both must end with bitwise equal results.

The graph is a `CpuGraph`, or a `CudaGraph` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from meshstep.amp import ApexFp16, Bf16, Fp32, NaiveFp16, Precision, TorchFp16
from meshstep.optim import (
    AdaGC,
    Adaptive,
    ByGroup,
    ByName,
    ByNorm,
    ByValue,
    GradStats,
    Lion,
    ParallelOptimizer,
    PerParameter,
    Sharded,
    SkipSpikes,
    WarmUp,
    ZClip,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from precision_modes import snapshot
from small_models import Mlp
from torch import Tensor, nn

STEPS = 24
OVERFLOWS = (2, 9, 10, 11, 17)  # steps with a gradient that is not finite


class Graph(Protocol):
    """A graph that is captured once and replayed repeatedly."""

    def captured(self) -> AbstractContextManager[None]: ...
    def replay(self) -> None: ...


class CudaGraph:
    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def captured(self) -> Iterator[None]:
        with torch.cuda.graph(self._graph):
            yield

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def warm_up(device: torch.device) -> Iterator[None]:
    """Run the steps before a capture on a side stream, as torch requires for CUDA graphs."""
    if device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def _sgd(params: Any, lr: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, fused=True)


def _lion(params: Any, lr: Tensor) -> torch.optim.Optimizer:
    return Lion(params, lr=lr, weight_decay=0.1)


def _adamw(params: Any, lr: Tensor) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


@dataclass(frozen=True)
class Setting:
    precision: Precision = field(default_factory=Fp32)
    options: Mapping[str, Any] = field(default_factory=dict)
    inner: Callable[[Any, Tensor], torch.optim.Optimizer] = _adamw


_NAIVE = NaiveFp16(init_scale=2.0**8, growth_interval=3, hysteresis=2)
SETTINGS: dict[str, Setting] = {
    "fp32": Setting(),
    "fp16": Setting(TorchFp16(init_scale=2.0**8, growth_interval=3), {"max_norm": 0.5}),
    "bf16": Setting(Bf16(), {"max_norm": 0.5}),
    "split masters": Setting(Bf16(split_masters=True), {"max_norm": 0.5}),
    "fp16_naive": Setting(_NAIVE, {"max_norm": 0.5}),
    "O2": Setting(ApexFp16("O2", loss_scale=256.0), {"max_norm": 0.5}),
    "momentum": Setting(_NAIVE, {"max_norm": 0.5}, _sgd),
    "lion": Setting(_NAIVE, {"max_norm": 0.5}, _lion),
    "by value": Setting(options={"max_norm": ByValue(0.1)}),
    "by group": Setting(options={"max_norm": ByGroup((0.3,))}),
    "by parameter": Setting(_NAIVE, {"max_norm": PerParameter(0.2)}),
    "by unit": Setting(options={"max_norm": Adaptive()}),
    "by name": Setting(_NAIVE, {"max_norm": ByName({"*bias": ZClip(warm_up=2)}, others=ByNorm(WarmUp(0.5, 0.1, 9)))}),
    "spikes": Setting(options={"max_norm": SkipSpikes(50.0, AdaGC(0.3, warm_up=4), window=6, warm_up=3)}),
    "largest": Setting(options={"max_norm": ByNorm(0.1, norm_type=float("inf"))}),
    "p = 3": Setting(options={"norm_type": 3.0, "per_parameter_norms": True, "max_norm": 0.3}),
    "norms per group": Setting(options={"reduction": "per_group", "max_norm": 0.3}),
}
PLACED: dict[str, dict[str, Any]] = {
    "replicated": {},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
    "overlap": {"overlap": True},
}


class Run:
    def __init__(self, setting: Setting, device: torch.device, registry: ProcessGroupRegistry | None = None) -> None:
        registry = registry or ProcessGroupRegistry(Topology())
        self.device, self.coordinate = device, registry.global_rank
        torch.manual_seed(0)
        self.model: nn.Module = setting.precision.prepare(Mlp().to(device), registry)
        declare(self.model, {"*": P()})
        self.criterion = setting.precision.prepare_criterion(nn.functional.mse_loss)
        inner = setting.inner(self.model.named_parameters(), torch.tensor(1e-2, device=device))
        options: dict[str, Any] = {"precision": setting.precision, **setting.options}
        self.optimizer: ParallelOptimizer = ParallelOptimizer(inner, registry, **options)
        self.trace: list[Tensor] = []
        self.after_step: Callable[[], object] = lambda: None

    def batch(self, step: int, micro: int = 0) -> Tensor:
        """Return the batch of a step: [6 samples, 6 features]; the first 3 features are also the targets."""
        seed = 1000 * step + 10 * micro + self.coordinate
        drawn = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
        if step in OVERFLOWS and micro == 0:
            drawn[0, 0] = torch.inf
        return drawn.to(self.device)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        found: Tensor = self.criterion(self.model(batch), batch[:, :3].nan_to_num(posinf=1.0))
        return found

    def note(self, stats: GradStats | None) -> None:
        """Copy the step's statistics, which the next replay overwrites, into `trace`."""
        assert stats is not None  # the caller ends each window with a step
        numbers = [stats.total_norm, stats.clip_coef, stats.found_inf, *stats.group_norms]
        numbers += [] if stats.loss_scale is None else [stats.loss_scale]
        numbers += stats.parameter_norms.values()
        self.trace.append(torch.stack([number.double().nan_to_num(nan=-1.0) for number in numbers]))
        self.after_step()

    def left(self) -> dict[str, Tensor]:
        """Return the results of the run, on the CPU."""
        found = snapshot(self.model, self.optimizer) | {"trace": torch.stack(self.trace)}
        found["skipped"] = torch.tensor(self.optimizer.skipped_steps)
        if self.optimizer.loss_scale is not None:
            found["scale"] = self.optimizer.loss_scale.scale
        return {name: value.detach().cpu() for name, value in found.items()}

    # One step per batch -----------------------------------------------------------------------------------------------

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.optimizer.zero_grad()
            self.optimizer.backward(self.loss(self.batch(number)))
            self.note(self.optimizer.step())

    def replays(self, numbers: range, graph: Graph) -> None:
        """Run steps as replays of one graph, which is captured here."""
        static = torch.zeros_like(self.batch(0))
        self.optimizer.zero_grad()
        with graph.captured():
            self.optimizer.backward(self.loss(static))
            stats = self.optimizer.step()
        for number in numbers:
            static.copy_(self.batch(number))
            graph.replay()
            self.note(stats)
        self.optimizer.poll()

    # One step per window of micro-batches with different weights

    def _micro_batch(self, batch: Tensor, weight: Tensor, last: bool) -> GradStats | None:
        with nullcontext() if last else self.optimizer.no_sync():
            self.optimizer.backward(self.loss(batch) * weight.clamp(min=1), weight=weight)
        if not last:
            return None
        stats = self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # a graph accumulates into the existing gradient tensors
        return stats

    def _weight(self, number: int, micro: int) -> Tensor:
        """Return the weight of a micro-batch. In some windows one micro-batch has weight 0, although its loss is not 0."""
        return torch.tensor(0.0 if micro == number % 4 else micro + 1.0, device=self.device)

    def windows(self, numbers: range, count: int) -> None:
        for number in numbers:
            for micro in range(count):
                stats = self._micro_batch(self.batch(number, micro), self._weight(number, micro), micro == count - 1)
            self.note(stats)

    def window_replays(self, numbers: range, count: int, make: Callable[[], Graph]) -> None:
        """Run accumulation windows as replays of two graphs: one for a micro-batch, one for the last micro-batch
        and the step."""
        static, weight = torch.zeros_like(self.batch(0)), torch.zeros((), device=self.device)
        graphs, stats = {False: make(), True: make()}, None
        for last, graph in graphs.items():
            with graph.captured():
                stats = self._micro_batch(static, weight, last)
        for number in numbers:
            for micro in range(count):
                static.copy_(self.batch(number, micro))
                weight.copy_(self._weight(number, micro))
                graphs[micro == count - 1].replay()
            self.note(stats)
        self.optimizer.poll()


def by_steps(run: Run, micro: int = 1, steps: int = STEPS) -> dict[str, Tensor]:
    """Return the results of ``steps`` eager steps of ``micro`` micro-batches each."""
    if micro == 1:
        run.steps(range(steps))
    else:
        run.windows(range(steps), micro)
    return run.left()


def by_replays(
    run: Run, before: int, make: Callable[[], Graph], micro: int = 1, steps: int = STEPS
) -> dict[str, Tensor]:
    """Return the results of ``steps`` steps, of which all but the first ``before`` are graph replays."""
    with warm_up(run.device):
        if micro == 1:
            run.steps(range(before))
        else:
            run.windows(range(before), micro)
    if micro == 1:
        run.replays(range(before, steps), make())
    else:
        run.window_replays(range(before, steps), micro, make)
    return run.left()
