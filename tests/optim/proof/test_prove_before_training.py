"""`prove` changes nothing in a training run: before and after the optimizer is created, and between steps.

Exception: between an overlapped backward and its step, `prove` makes the step raise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arguments import arguments
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.optim.proof.prove import Proof, prove
from meshstep.parallel import (
    ColumnParallelLinear,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    declare,
    shard,
)
from torch import Tensor, nn
from world import World

TOPOLOGY = Topology(data=2, tensor=2)


class Model(nn.Module):
    """A model whose forward changes state: dropout, running statistics, and a counter that is reassigned."""

    calls: Tensor

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        torch.manual_seed(3)
        random.seed(3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.up = ColumnParallelLinear(6, 8, registry)
        self.down = RowParallelLinear(8, 6, registry)
        self.statistics = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        declare(self, {"frozen.*": P(), "statistics.*": P()})

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        hidden = F.gelu(self.up(self.frozen(x)))
        out: Tensor = self.statistics(self.down(self.dropout(hidden)))
        return out * random.uniform(0.9, 1.1)


def batch(step: int, registry: ProcessGroupRegistry) -> Tensor:
    return shard(torch.randn(8, 6, generator=torch.Generator().manual_seed(step)), P("data"), registry)


def loss_on(step: int, registry: ProcessGroupRegistry) -> Callable[[Model], Tensor]:
    return lambda model: (model(batch(step, registry).to(model.up.weight.dtype)) - 1).square().mean()


def values(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from values(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from values(value)
    else:
        yield tree.clone() if isinstance(tree, Tensor) else tree


def everything(model: Model, optimizer: ParallelOptimizer[Any] | None = None) -> list[Any]:
    """Return all state that training depends on, and the addresses of tensors."""
    found: list[Any] = [torch.get_rng_state(), repr(random.getstate()), torch.get_default_dtype(), model.training]
    for name, param in model.named_parameters():
        grad = None if param.grad is None else (param.grad.data_ptr(), param.grad.clone())
        found += [name, id(param), param.data_ptr(), param.dtype, param.requires_grad, param.grad_dtype, param.clone()]
        found += list(values(grad))
    for name, buffer in model.named_buffers():
        found += [name, id(buffer), buffer.dtype, buffer.clone()]
    return found if optimizer is None else found + list(values(optimizer.state_dict()))


def assert_the_same(now: list[Any], before: list[Any]) -> None:
    assert len(now) == len(before)
    for one, other in zip(now, before, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def run(options: dict[str, Any], dtype: torch.dtype, proving: bool, micro: int) -> tuple[list[Any], list[Proof]]:
    """Run two steps of ``micro`` micro-batches, with or without proofs. Return the final state, and the proofs."""
    proofs: list[Proof] = []
    with ProcessGroupRegistry(TOPOLOGY) as registry:
        model = Model(registry).to(dtype)

        def proved(optimizer: ParallelOptimizer[Any] | None = None) -> None:
            if proving:
                before = everything(model, optimizer)
                proofs.append(prove(model, loss_on(99, registry), registry, max_parameters=4))
                assert_the_same(everything(model, optimizer), before)

        torch.manual_seed(5)
        random.seed(5)
        proved()
        inner = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        optimizer = ParallelOptimizer(inner, registry, **arguments(max_norm=0.3, accumulation_steps=micro, **options))
        proved(optimizer)
        norms = []
        for step in range(2 * micro):
            optimizer.backward(loss_on(step, registry)(model))
            if "overlap" not in options:
                proved(optimizer)
            stats = optimizer.step()
            if stats is not None:
                norms.append(stats.total_norm)
            proved(optimizer)
            optimizer.zero_grad()
            proved(optimizer)
        return [*everything(model, optimizer)[4:], *norms, torch.rand(3), random.random()], proofs


OPTIONS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "float32": ({}, torch.float32),
    "float64": ({}, torch.float64),
    "masters": ({"precision": "bf16"}, torch.bfloat16),
    "overlapped": ({"overlap": True}, torch.float32),
    "sharded": ({"states": Sharded("data")}, torch.float32),
    "sharded gradients": ({"states": Sharded("data", gradients=True)}, torch.float32),
}


def both(options: dict[str, Any], dtype: torch.dtype, micro: int) -> list[Proof]:
    """Train with and without proofs; the runs must be bitwise identical. Return the proofs."""
    expected, _ = run(options, dtype, False, micro)
    found, proofs = run(options, dtype, True, micro)
    where = {type(None), int}  # ids and addresses differ between runs
    assert_the_same([x for x in found if type(x) not in where], [x for x in expected if type(x) not in where])
    return proofs


@pytest.mark.long
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_prove_does_not_change_training_run(world: World, name: str, micro: int) -> None:
    options, dtype = OPTIONS[name]
    for proofs in world.run(4, both, options, dtype, micro):
        assert len(proofs) == 2 + (4 if name == "overlapped" else 6) * micro
        for proof in proofs:
            assert proof.is_correct, str(proof)
            assert (len(proof.proved), len(proof.undecided)) in [(3, 3), (4, 2)]


def before_its_step() -> str:
    with ProcessGroupRegistry(TOPOLOGY) as registry:
        model = Model(registry)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), registry, overlap=True)
        optimizer.backward(loss_on(0, registry)(model))
        prove(model, loss_on(1, registry), registry)
        before = everything(model)
        with pytest.raises(RuntimeError) as told:
            optimizer.step()
        assert_the_same(everything(model), before)
        return str(told.value)


def test_prove_between_overlapped_backward_and_step_makes_step_raise(world: World) -> None:
    """The step cannot distinguish the backward of `prove` from a backward of training."""
    for told in world.run(4, before_its_step):
        assert "got a gradient outside of optimizer.backward, after the gradients of this step had been reduced" in told


# Loss functions that raise --------------------------------------------------------------------------------------------


def raises_on_one_rank(when: int) -> list[str]:
    """Raise on one rank in call number ``when`` of the loss function; then prove without an error.

    Return the type and the text of the first error.
    """
    with ProcessGroupRegistry(TOPOLOGY) as registry:
        model, calls = Model(registry), 0
        before = everything(model)

        def loss_fn(given: Model) -> Tensor:
            nonlocal calls
            calls += 1
            loss = loss_on(0, registry)(given)
            if calls == when and registry.global_rank == 3:
                raise KeyError("a label that the batch lacks")
            return loss

        with pytest.raises((RuntimeError, KeyError)) as told:
            prove(model, loss_fn, registry)
        assert_the_same(everything(model), before)
        assert prove(model, loss_fn, registry).is_correct
        return [type(told.value).__name__, str(told.value)]


@pytest.mark.parametrize("when", [1, 2])
def test_prove_with_loss_that_raises_on_one_rank_raises_on_all_ranks(world: World, when: int) -> None:
    *others, last = world.run(4, raises_on_one_rank, when)
    assert last == ["KeyError", "'a label that the batch lacks'"]
    for kind, text in others:
        assert kind == "RuntimeError"
        assert text == "rank 3: KeyError: 'a label that the batch lacks'"
