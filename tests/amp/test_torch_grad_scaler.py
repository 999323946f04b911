"""`GradScaler` with a `ParallelOptimizer` in one process, compared with torch's classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from meshstep.amp import GradScaler, precision_of
from meshstep.optim import Offloaded, ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn

Scaler = torch.amp.GradScaler
SETTINGS: dict[str, Any] = {"init_scale": 2.0**12, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
SKIPPED = 3
INPUTS = [torch.randn(8, 8, generator=torch.Generator().manual_seed(number)) for number in range(7)]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adam, fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}


@pytest.fixture
def registry() -> Iterator[ProcessGroupRegistry]:
    with ProcessGroupRegistry(Topology()) as registry:
        yield registry


@pytest.fixture(autouse=True)
def _torchs_kernels(torchs_kernels: None) -> None:
    """Use torch's kernels, because results are compared bitwise."""


class Run:
    """Two layers, one optimizer for both or one per layer, and a scaler."""

    def __init__(self, kind: str, registry: ProcessGroupRegistry | None, count: int = 1, **options: Any) -> None:
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        declare(self.layers, {"*": P()})
        parts: list[nn.Module] = [self.layers] if count == 1 else [self.layers[0], self.layers[2]]
        inner = [OPTIMIZERS[kind](part.parameters()) for part in parts]
        self.scaler: Scaler = Scaler("cpu", **SETTINGS) if registry is None else GradScaler(registry, **SETTINGS)
        self.optimizers: list[torch.optim.Optimizer] = list(inner)
        if registry is not None:
            self.optimizers = [ParallelOptimizer(each, registry, **options) for each in inner]
        self.seen: list[Any] = []

    def loss(self, step: int, part: int = 0, parts: int = 1) -> Tensor:
        rows = 8 // parts
        loss: Tensor = self.layers(INPUTS[step][part * rows : (part + 1) * rows]).square().mean() / parts
        return loss * float("inf") if step == SKIPPED and part == 0 else loss

    def finish(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.seen.append([self.scaler.get_scale(), [param.tolist() for param in self.layers.parameters()]])


def backward(run: Run, step: int, parts: int = 1) -> None:
    for part in range(parts):
        run.scaler.scale(run.loss(step, part, parts)).backward()


def one_backward(run: Run, step: int) -> None:
    backward(run, step)
    run.finish()


def accumulated(run: Run, step: int) -> None:
    backward(run, step, parts=4)
    run.finish()


def clipped(run: Run, step: int) -> None:
    backward(run, step)
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(run.layers.parameters(), 0.05)
    run.finish()


def clipped_while_scaled(run: Run, step: int) -> None:
    """Clip scaled gradients with a scaled threshold."""
    backward(run, step)
    torch.nn.utils.clip_grad_norm_(run.layers.parameters(), 0.05 * run.scaler.get_scale())
    run.finish()


def penalised(run: Run, step: int) -> None:
    """Add a penalty on the gradient of the loss, which needs a second backward."""
    params = list(run.layers.parameters())
    loss = run.loss(step)
    scaled = torch.autograd.grad(run.scaler.scale(loss), params, create_graph=True)
    gradients = [gradient / run.scaler.get_scale() for gradient in scaled]
    penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    run.scaler.scale(loss + penalty).backward()
    run.finish()


WAYS: dict[str, Callable[[Run, int], None]] = {
    "one backward": one_backward,
    "accumulated": accumulated,
    "clipped": clipped,
    "clipped while scaled": clipped_while_scaled,
    "penalised": penalised,
}


def trained(run: Run, way: str, first: int = 0) -> list[Any]:
    for step in range(first, len(INPUTS)):
        WAYS[way](run, step)
    return run.seen


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_parallel_optimizer_with_grad_scaler_is_bitwise_identical_to_torch(
    registry: ProcessGroupRegistry, way: str, kind: str
) -> None:
    expected = trained(Run(kind, None), way)
    assert trained(Run(kind, registry), way) == expected
    scales, weights = zip(*expected, strict=True)
    assert weights[SKIPPED] == weights[SKIPPED - 1] != weights[SKIPPED + 1]
    assert [new / old for old, new in pairwise(scales)] == [4.0, 1.0, 0.25, 1.0, 4.0, 1.0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", ["one backward", "clipped"])
def test_two_optimizers_with_one_grad_scaler_train_as_in_torch(
    registry: ProcessGroupRegistry, way: str, kind: str
) -> None:
    assert trained(Run(kind, registry, count=2), way) == trained(Run(kind, None, count=2), way)


@pytest.mark.parametrize("kind", ["SGD", "Adam, fused"])
def test_overflow_of_one_optimizer_skips_only_its_step(registry: ProcessGroupRegistry, kind: str) -> None:
    def run(registry: ProcessGroupRegistry | None) -> list[Any]:
        run = Run(kind, registry, count=2)
        for step in range(3):
            backward(run, step)
            if step == 1:
                bias = run.layers[2].bias
                assert isinstance(bias, Tensor)
                assert bias.grad is not None
                bias.grad[3] = float("inf")
            run.finish()
        return run.seen

    found = run(registry)
    assert found == run(None)
    (_, before), (_, after) = found[:2]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True, True]


@pytest.mark.parametrize("kind", ["SGD", "Adam, fused"])
def test_loaded_grad_scaler_and_optimizer_continue_bitwise_identically(
    registry: ProcessGroupRegistry, kind: str
) -> None:
    one, other = Run(kind, registry), Run(kind, registry)
    for step in range(SKIPPED + 1):
        one_backward(one, step)
    other.layers.load_state_dict(one.layers.state_dict())
    # A copy, because `load_state_dict` keeps references to the given tensors, as in torch.
    other.optimizers[0].load_state_dict(copy.deepcopy(one.optimizers[0].state_dict()))
    other.scaler.load_state_dict(one.scaler.state_dict())
    one.seen.clear()
    assert trained(other, "one backward", SKIPPED + 1) == trained(one, "one backward", SKIPPED + 1)


def test_scale_of_grad_scaler_does_not_grow_beyond_float32(registry: ProcessGroupRegistry) -> None:
    def run(registry: ProcessGroupRegistry | None) -> float:
        run = Run("SGD", registry)
        run.scaler = Scaler("cpu", 1e38, 10.0, growth_interval=1)
        if registry is not None:
            run.scaler = GradScaler(registry, 1e38, 10.0, growth_interval=1)
        run.scaler.scale(run.layers(INPUTS[0]).sum() * 1e-38).backward()
        run.finish()
        return run.scaler.get_scale()

    assert run(registry) == run(None) == pytest.approx(1e38)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_repeated_unscale_or_step_raises_as_in_torch(registry: ProcessGroupRegistry, call: str) -> None:
    run = Run("SGD", registry)
    backward(run, 0)
    first = run.scaler.unscale_ if call == "unscale_" else run.scaler.step
    first(run.optimizers[0])
    with pytest.raises(RuntimeError, match="has already been called"):
        first(run.optimizers[0])


def test_disabled_grad_scaler_trains_as_without_a_grad_scaler(registry: ProcessGroupRegistry) -> None:
    def run(scaler: Callable[[], Scaler] | None) -> list[Any]:
        run = Run("SGD", registry)
        if scaler is not None:
            run.scaler = scaler()
        for step in range(SKIPPED):
            one_backward(run, step) if scaler is not None else _plain(run, step)
        return [weights for _, weights in run.seen]

    def _plain(run: Run, step: int) -> None:
        run.loss(step).backward()
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
        run.seen.append([1.0, [param.tolist() for param in run.layers.parameters()]])

    assert run(partial(GradScaler, registry, enabled=False)) == run(None)


def test_grad_scaler_rejects_an_offloaded_optimizer(registry: ProcessGroupRegistry) -> None:
    run = Run("SGD", registry, states=Offloaded(1.0))
    backward(run, 0)
    with pytest.raises(RuntimeError, match="a GradScaler can't unscale the gradients that this optimizer applies"):
        run.scaler.step(run.optimizers[0])


def test_grad_scaler_rejects_optimizer_with_its_own_loss_scale(registry: ProcessGroupRegistry) -> None:
    model = precision_of("fp16_naive").prepare(nn.Linear(2, 2))
    declare(model, {"*": P()})
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters()), registry, precision="fp16_naive")
    scaler = GradScaler(registry, **SETTINGS)
    torch.autograd.backward(scaler.scale(model(torch.ones(1, 2).half()).sum()))
    with pytest.raises(RuntimeError, match=r"precision='fp16_naive' has a loss scale of its own: leave the GradScaler"):
        scaler.step(optimizer)


def test_parallel_optimizer_rejects_grad_scaler_of_torch(registry: ProcessGroupRegistry) -> None:
    run = Run("SGD", registry)
    run.scaler = Scaler("cpu")
    backward(run, 0)
    with pytest.raises(RuntimeError, match=r"use meshstep.amp.GradScaler\(registry\)"):
        run.scaler.step(run.optimizers[0])
