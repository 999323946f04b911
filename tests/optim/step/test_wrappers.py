"""Wrappers of data-parallel modules, optimizers with train and eval modes, and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import Offloaded, ParallelOptimizer, Sharded, StatePlacement
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from world import World


class Fabric(nn.Module):
    """A wrapper that holds both the wrapped module and the user's module, as a framework may."""

    def __init__(self, module: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = module, own

    def forward(self, x: Tensor) -> Any:
        return self._forward_module(x)


class Outer(nn.Module):
    """A wrapper that stores the wrapped module as `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def wrapped_steps(how: str, wrapper: str) -> list[float]:
    """Run two windows of two micro-batches and return the weights."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(4)
        own = nn.Linear(3, 2)
        declare(own, {"*": P()})
        model: nn.Module = own
        if how == "ddp":
            model = DistributedDataParallel(own, process_group=registry.group("data"))
        elif how == "fsdp":
            fully_shard(own, mesh=registry.device_mesh("data"))
        if wrapper == "compiled":
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        elif wrapper == "fabric":
            model = Fabric(model, own)
        elif wrapper == "both":
            model = Outer(Fabric(model, own))
        sgd = torch.optim.SGD(own.parameters(), lr=0.5, fused=True)
        optimizer = ParallelOptimizer(sgd, registry, max_norm=0.7, accumulation_steps=2, data_parallel=model)
        for step in range(4):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + registry.global_rank))
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in own.parameters()]
        return torch.cat([param.detach().flatten() for param in whole]).tolist()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("wrapper", ["compiled", "fabric", "both"])
def test_data_parallel_module_inside_other_wrappers_is_found(world: World, how: str, wrapper: str) -> None:
    expected = world.run(2, wrapped_steps, how, "")
    assert expected[0] == expected[1]
    for found in world.run(2, wrapped_steps, how, wrapper):
        assert found == pytest.approx(expected[0], rel=1e-6)


def test_wrapper_without_data_parallel_module_is_rejected() -> None:
    model = Fabric(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"data_parallel=Fabric: give the DistributedDataParallel module"):
        ParallelOptimizer(torch.optim.SGD(model.parameters()), ProcessGroupRegistry(Topology()), data_parallel=model)


class Averaged(torch.optim.SGD):
    """SGD whose `eval` weights are the mean of first and current weights, as in schedule-free optimizers."""

    elementwise = True
    training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert self.training, "call train() before step()"
        for param in self.param_groups[0]["params"]:
            if "first" not in self.state[param]:
                self.state[param]["first"] = param.detach().clone()
        return super().step(closure)

    def train(self) -> None:
        self._move(not self.training, 2.0)
        self.training = True

    def eval(self) -> None:
        self._move(self.training, 0.5)
        self.training = False

    @torch.no_grad()
    def _move(self, needed: bool, weight: float) -> None:
        for param in self.param_groups[0]["params"] if needed else ():
            if "first" in self.state[param]:
                param.lerp_(self.state[param]["first"], 1.0 - weight)


def modes(states: tuple[StatePlacement, ...], masters: bool) -> list[list[float]]:
    """Return the model's weights: initial, after a step, in eval, in train again, and after another step."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(2)
        model = nn.Linear(5, 3, bias=False)
        declare(model, {"*": P()})
        precision: Any = "fp32"
        if masters:
            precision = Bf16()
            precision.prepare(model, registry)
        optimizer = ParallelOptimizer(
            Averaged(model.parameters(), lr=0.25), registry, max_norm=1.0, states=states, precision=precision
        )
        seen = [model.weight.detach().float().flatten().tolist()]

        def step() -> None:
            optimizer.zero_grad()
            optimizer.backward(model(torch.full((2, 5), 1.0 + registry.global_rank)).float().square().mean())
            optimizer.step()

        for change in (step, optimizer.eval, optimizer.train, step):
            change()
            seen.append(model.weight.detach().float().flatten().tolist())
        return seen


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("states", [(), (Sharded("data"),), (Sharded("data"), Offloaded(1.0))], ids=str)
def test_train_and_eval_of_optimizer_update_model_weights(
    world: World, states: tuple[StatePlacement, ...], masters: bool
) -> None:
    first, second = world.run(2, modes, states, masters)
    assert first == second
    start, stepped, shown, back, again = (torch.tensor(weights) for weights in first)
    rtol, atol = (1e-2, 1e-3) if masters else (1e-5, 1e-6)
    assert not torch.allclose(start, stepped, rtol=rtol, atol=atol)
    assert torch.allclose(shown, (start + stepped) / 2, rtol=rtol, atol=atol)
    assert torch.allclose(back, stepped, rtol=rtol, atol=atol)
    assert not torch.allclose(again, back, rtol=rtol, atol=atol)


def test_train_and_eval_of_plain_optimizer_keep_weights() -> None:
    model = nn.Linear(2, 2)
    optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters()), ProcessGroupRegistry(Topology()))
    before = model.weight.detach().clone()
    optimizer.eval()
    optimizer.train()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("accumulation_steps", [None, 2])
@pytest.mark.parametrize("compiled", ["step", "training step"])
def test_compiled_step_matches_uncompiled_step(compiled: str, accumulation_steps: int | None) -> None:
    torch.compiler.reset()
    weights = []
    for now in ("nothing", compiled):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        adamw = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        optimizer = ParallelOptimizer(
            adamw, ProcessGroupRegistry(Topology()), max_norm=0.1, accumulation_steps=accumulation_steps
        )
        step: Any = torch.compile(optimizer.step, backend="eager") if now == "step" else optimizer.step

        def train_step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer, step: Any = step) -> Any:
            optimizer.zero_grad()
            optimizer.backward(model(x).square().mean())
            return step()

        run: Any = torch.compile(train_step, backend="eager") if now == "training step" else train_step
        for number, size in enumerate((1.0, 2.0, 3.0, 4.0), 1):
            stats = run(torch.full((2, 4), size))
            assert (stats is None) == (accumulation_steps == 2 and number % 2 == 1)
            assert stats is None or float(stats.total_norm) > 0.1
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_compiling_step_with_fullgraph_raises() -> None:
    torch.compiler.reset()
    param = nn.Parameter(torch.ones(2))
    optimizer = ParallelOptimizer(torch.optim.SGD([param]), ProcessGroupRegistry(Topology()))
    with pytest.raises(Exception, match=r"ParallelOptimizer\.step"):
        torch.compile(optimizer.step, fullgraph=True, backend="eager")()
