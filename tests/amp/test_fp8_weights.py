"""Cached 8-bit weights, which must never be outdated.

Weights are rounded once per step, with row scales twice; after a graph capture and under no_grad, in every forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from meshstep.amp import Fp8
from meshstep.amp import fp8 as summa
from meshstep.amp import fp8_linear as linear
from meshstep.amp.fp8_linear import quantize
from meshstep.optim import ParallelOptimizer, Sharded, broadcast_weights
from meshstep.parallel import Linear2D, P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

Scales = Literal["tensor", "row"]
MICRO_BATCHES = 4


class Counts:
    """Stands in for `quantize`, and counts how often it rounds tensors of each shape."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor, *args: Any) -> Any:
        self.shapes.append(tuple(x.shape))
        return quantize(x, *args)

    def of(self, *shapes: tuple[int, ...]) -> int:
        """Return how many tensors of these shapes were rounded since the last call."""
        found = sum(self.shapes.count(shape) for shape in shapes)
        self.shapes.clear()
        return found


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    with (
        mock.patch.object(linear, "quantize", counts),
        mock.patch.object(summa, "quantize", counts),
    ):
        yield counts


@contextmanager
def rounded_every_time() -> Iterator[None]:
    with mock.patch.object(linear, "cache_of", return_value=None):
        yield


WEIGHT, TRANSPOSED = (32, 48), (48, 32)


def prepared(scales: Scales = "tensor", base: Literal["bf16", "fp32"] = "fp32") -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(48, 32), nn.Tanh())
    declare(model, {"*": P()})
    return Fp8(base, scales=scales).prepare(model)


def loss_of(model: nn.Module, micro_batch: int) -> Tensor:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(micro_batch), requires_grad=True)
    loss: Tensor = model(x).float().square().mean()
    return loss


def wrapped(model: nn.Module, **options: Any) -> ParallelOptimizer[Any]:
    return ParallelOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), ProcessGroupRegistry(Topology()), **options
    )


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize(("scales", "sides"), [("tensor", 1), ("row", 2)])
@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_fp8_weight_is_rounded_once_per_step_or_twice_with_row_scales(
    base: Literal["bf16", "fp32"], scales: Scales, sides: int, managed: bool
) -> None:
    """Four micro-batches use one rounded weight, even if `step` is called after each. Row scales need two roundings."""
    model = prepared(scales, base)
    mode = Fp8(base, scales=scales)
    options = {"accumulation_steps": MICRO_BATCHES} if managed else {}
    optimizer = wrapped(model, precision=mode, **options)
    with counted() as counts:
        for _ in range(3):
            for micro_batch in range(MICRO_BATCHES):
                optimizer.backward(loss_of(model, micro_batch))
                if managed or micro_batch == MICRO_BATCHES - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            assert counts.of(WEIGHT, TRANSPOSED) == sides


def adamw_that_counts_no_writes(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


class ByOtherKernels(torch.optim.Optimizer):
    """An optimizer whose writes do not change version counters, like a library with its own kernels."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=0.3)


@pytest.mark.parametrize("make", [adamw_that_counts_no_writes, ByOtherKernels])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_training_with_cached_fp8_weights_equals_training_without_cache(
    scales: Scales, wrap: bool, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def trained() -> list[Tensor]:
        model = prepared(scales)
        optimizer: Any = make(model.parameters())
        if wrap:
            optimizer.elementwise = True
            optimizer = ParallelOptimizer(optimizer, ProcessGroupRegistry(Topology()), precision=Fp8("fp32"))
        losses = []
        for step in range(4):
            for micro_batch in range(2):
                loss = loss_of(model, 2 * step + micro_batch)
                optimizer.backward(loss) if wrap else loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *(param.detach() for param in model.parameters())]

    found = trained()
    with rounded_every_time():
        expected = trained()
    assert len({float(loss) for loss in found[:8]}) == 8
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0, 0] += 1.0


def other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2


def loaded(weight: nn.Parameter) -> None:
    holder = nn.Module()
    holder.weight = weight
    holder.load_state_dict({"weight": torch.ones_like(weight)})


@pytest.mark.parametrize("change", [in_place, other_memory, loaded])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_changed_fp8_weight_is_rounded_again(scales: Scales, change: Callable[[nn.Parameter], None]) -> None:
    model = prepared(scales)
    weight: Any = model[0].weight  # type: ignore[index]
    loss_of(model, 0).backward()
    change(weight)
    found = loss_of(model, 0)
    with rounded_every_time():
        assert torch.equal(found, loss_of(model, 0))


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_fp8_forward_under_no_grad_rounds_the_current_weight(scales: Scales) -> None:
    """Averaged weights are often swapped in and out by writes that do not change the version counter."""
    model = prepared(scales)
    weight: Any = model[0].weight  # type: ignore[index]
    before = loss_of(model, 0)
    own, averaged = weight.detach().clone(), torch.ones_like(weight)
    weight.data.copy_(averaged)
    with torch.no_grad():
        found = loss_of(model, 0)
    with rounded_every_time():
        assert torch.equal(found, loss_of(model, 0))
    weight.data.copy_(own)
    assert torch.equal(loss_of(model, 0), before)


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_fp8_weight_used_in_graph_capture_is_rounded_in_every_later_forward(scales: Scales) -> None:
    """A replay of the graph changes weights but not their version counter, so no cached weight is known to be current."""
    model = prepared(scales)
    loss_of(model, 0).backward()
    with mock.patch.object(linear, "is_captured", return_value=True):
        loss_of(model, 0).backward()
    with counted() as counts:
        for micro_batch in range(MICRO_BATCHES):
            loss_of(model, micro_batch).backward()
        assert counts.of(WEIGHT, TRANSPOSED) == MICRO_BATCHES * (2 if scales == "row" else 1)


def test_deepcopied_fp8_model_does_not_share_cached_weights() -> None:
    model = prepared()
    loss_of(model, 0).backward()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()  # type: ignore[index]
    with rounded_every_time():
        expected = loss_of(other, 0)
    assert torch.equal(loss_of(other, 0), expected)


def rounded_on_a_grid() -> list[int]:
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        layer = Linear2D(96, 64, registry)
        Fp8("fp32").prepare(layer, registry)
        optimizer = ParallelOptimizer(
            torch.optim.AdamW(layer.parameters(), fused=True), registry, precision=Fp8("fp32"), accumulation_steps=4
        )
        found = []
        with counted() as counts:
            for _ in range(2):
                for _ in range(MICRO_BATCHES):
                    optimizer.backward(layer(torch.ones(3, 48)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(counts.of(tuple(layer.weight.shape)))
        return found


def test_fp8_weight_of_linear_2d_is_rounded_once_per_step(world: World) -> None:
    assert world.run(4, rounded_on_a_grid) == [[1, 1]] * 4


def sharded_training(every_time: bool) -> list[float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = prepared()
        optimizer = ParallelOptimizer(
            adamw_that_counts_no_writes(model.parameters()), registry, precision=Fp8("fp32"), states=Sharded("data")
        )
        losses = []
        for step in range(4):
            with rounded_every_time() if every_time else counted():
                loss = loss_of(model, step)
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def test_fp8_weights_updated_by_other_ranks_are_rounded_again(world: World) -> None:
    assert world.run(2, sharded_training, False) == world.run(2, sharded_training, True)


def shared_after_a_forward() -> bool:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = prepared()
        with torch.no_grad():
            model[0].weight.mul_(1 + registry.global_rank)  # type: ignore[index]
        loss_of(model, 0)
        broadcast_weights(model, registry)
        found = loss_of(model, 0)
        with rounded_every_time():
            return torch.equal(found, loss_of(model, 0))


def test_fp8_weights_received_by_broadcast_weights_are_rounded_again(world: World) -> None:
    assert world.run(2, shared_after_a_forward) == [True, True]


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("which", ["input", "weight"])
def test_fp8_linear_rejects_float64_input_and_weight(which: str, scales: Scales) -> None:
    model = prepared(scales)
    x = torch.ones(2, 48, dtype=torch.float64 if which == "input" else torch.float32)
    if which == "weight":
        model.double()
    with pytest.raises(TypeError, match=r"an FP8 linear layer got a float64 input or weight.*Fp8\(exclude=...\)"):
        model[0].matmul(x, *model[0].parameters())  # type: ignore[index]


# The compiler of torch 2.11 gives this warning.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_compiled_fp8_model_is_one_graph_and_equals_eager_after_updates(scales: Scales) -> None:
    """A rounded weight that is cached in the graph would never be updated."""
    model = prepared(scales)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = adamw_that_counts_no_writes(model.parameters())
    for step in range(3):
        loss = loss_of(compiled, step)
        assert torch.equal(loss, loss_of(model, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
