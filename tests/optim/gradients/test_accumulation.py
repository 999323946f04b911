"""Accumulation windows by `no_sync` or `accumulation_steps`: averaging, weights, short last windows, cleared gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from arguments import arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from meshstep.amp import precision_of
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, shard
from optimizers import momentum_sgd
from probes import collectives
from properties import number_of_cases, random_cases
from scenarios import VOCAB, Scenario, build, dense_1d, full_tensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import World
from zero_models import difference, rows

STEPS = 20
ONE = (("data", 1), ("tensor", 1))
TWO = (("data", 2), ("tensor", 1))
# Relative to the largest parameter. Micro-batches of a half-precision model round differently than one batch.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def train(axes: tuple[tuple[str, int], ...], micro: int, precision: str, how: str, options: dict[str, Any]) -> Any:
    """Run 20 accumulation windows. Return the full parameters, and the number of all-reduces in `step` per window."""
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry:
        scenario = Scenario(axes, "1d", dense_1d)
        model = build(scenario, registry, torch.float32)
        assert model is not None
        mode = precision_of(precision)
        mode.prepare(model, registry)
        if how == "ddp":
            options = {**options, "data_parallel": DistributedDataParallel(model, process_group=registry.group("data"))}
        optimizer = ParallelOptimizer(
            momentum_sgd(model.parameters()),
            registry,
            **arguments(
                precision=mode, max_norm=0.4, accumulation_steps=None if how == "explicit" else micro, **options
            ),
        )
        run = options.get("data_parallel", model)
        reduced = 0
        for step in range(STEPS):
            for index, part in enumerate(shard(rows(step, 12), P("data"), registry).chunk(micro)):
                optimizer.zero_grad() if how != "explicit" or index == 0 else None
                with optimizer.no_sync() if how == "explicit" and index < micro - 1 else nullcontext():
                    loss = run(part)
                    optimizer.backward(loss / micro if how == "explicit" else loss)
                with collectives() as seen:
                    stats = optimizer.step() if how != "explicit" or index == micro - 1 else None
                assert (stats is None) == (index < micro - 1)
                reduced += seen["all_reduce"]
        whole = full_tensors(scenario, model, registry, gradients=False)
        return {name: tensor.float() for name, tensor in whole.items()}, reduced / STEPS


@pytest.mark.parametrize("how", ["explicit", "ddp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_with_no_sync_or_ddp_matches_one_batch_on_one_process(
    world: World, how: str, precision: str
) -> None:
    expected, _ = world.run(1, train, ONE, 1, precision, "managed", {})[0]
    for found, reduced in world.run(2, train, TWO, 3, precision, how, {}):
        # DDP averages in the parameters' dtype, so it adds half-precision micro-batches in half precision.
        assert difference(found, expected) <= TOLERANCE[precision] * (2 if how == "ddp" else 1)
        assert reduced == (1 if how == "ddp" else 2)


# Weights --------------------------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """A classifier of the mean of embeddings; the loss is summed over the samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(VOCAB, 6, dtype=torch.float64), nn.Linear(6, VOCAB, dtype=torch.float64)
        declare(self, {"*": P()})

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.table(ids[:, :-1]).mean(1)), ids[:, -1], reduction="sum")


def window(counts: list[list[int]], weighted: bool, axes: tuple[tuple[str, int], ...]) -> tuple[float, Tensor]:
    """Run one accumulation window with ``counts[data rank][micro-batch]`` rows. Return the global norm and the head's
    weight gradient."""
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry:
        model = Bag()
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, max_norm=1e6)
        mine = registry.coordinate["data"]
        ids = rows(0, sum(map(sum, counts)))
        start = sum(map(sum, counts[:mine]))
        for index, count in enumerate(counts[mine]):
            part = ids[start : start + count]
            start += count
            if weighted:
                # A weight may be a device tensor, which the host must not read.
                optimizer.backward(model(part), weight=torch.tensor(float(count)) if index % 2 else count)
            else:
                optimizer.backward(model(part) / max(count, 1) / len(counts[mine]))
        stats = optimizer.step()
        assert stats is not None
        assert model.head.weight.grad is not None
        return float(stats.total_norm), model.head.weight.grad


def dense_window(total: int) -> tuple[float, Tensor]:
    model = Bag()
    (model(rows(0, total)) / total).backward()
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    assert model.head.weight.grad is not None
    return float(norm), model.head.weight.grad


UNEQUAL = [[5, 1, 2], [1, 1, 9]]


@pytest.mark.default_cases(3)  # with a tensor axis, several ranks pass the weight of the same micro-batch
@pytest.mark.parametrize("axes", [(("data", 2),), (("data", 2), ("tensor", 2)), (("pipe", 1), ("data", 2))])
def test_weighted_micro_batches_give_mean_over_all_samples(world: World, axes: tuple[tuple[str, int], ...]) -> None:
    norm, gradient = dense_window(19)
    size = Topology(roles=None, **dict(axes)).world_size
    for found, grad in world.run(size, window, UNEQUAL, True, axes):
        assert found == pytest.approx(norm, rel=1e-10)
        torch.testing.assert_close(grad, gradient, rtol=1e-10, atol=1e-13)


def test_unweighted_micro_batches_of_unequal_size_differ_from_mean_over_samples(world: World) -> None:
    norm, gradient = dense_window(19)
    for found, grad in world.run(2, window, UNEQUAL, False, (("data", 2),)):
        assert abs(found / norm - 1) > 0.05
        assert float((grad - gradient).norm() / gradient.norm()) > 0.05


@random_cases(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=2, max_size=2), 60)
def test_random_micro_batch_weights_give_dense_norm(world: World, drawn: list[list[list[int]]]) -> None:
    drawn = [counts for counts in drawn if any(map(any, counts))]
    results = world.run_each(window, [(2, (counts, True, (("data", 2),))) for counts in drawn])
    for counts, by_rank in zip(drawn, results, strict=True):
        norm, _ = dense_window(sum(map(sum, counts)))
        for found, _ in by_rank:
            assert found == pytest.approx(norm, rel=1e-10)


# Windows by accumulation_steps=, and errors ---------------------------------------------------------------------------


def linear(**options: Any) -> tuple[nn.Linear, ParallelOptimizer]:
    torch.manual_seed(7)
    model = nn.Linear(4, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, fused=True)
    return model, ParallelOptimizer(optimizer, ProcessGroupRegistry(Topology()), **arguments(**options))


def samples(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@settings(max_examples=number_of_cases(80))
@given(
    micro=st.integers(1, 5),
    batches=st.integers(1, 12),
    size=st.integers(1, 3),
    order=st.sampled_from(["zero, backward, step", "backward, step, zero"]),
)
def test_accumulation_steps_with_shorter_last_window_match_torch(
    micro: int, batches: int, size: int, order: str
) -> None:
    """torch gets all micro-batches of a window as one batch."""
    data = samples(batches * size)
    model, optimizer = linear(accumulation_steps=micro, max_norm=0.8)
    dense, _ = linear()
    plain = torch.optim.SGD(dense.parameters(), lr=0.5, momentum=0.5)
    for index, part in enumerate(data.split(size)):
        if order.startswith("zero"):
            optimizer.zero_grad()
        optimizer.backward(model(part).square().mean())
        stats = optimizer.step(final=index == batches - 1)
        if order.endswith("zero"):
            optimizer.zero_grad()
        assert (stats is not None) == (index % micro == micro - 1 or index == batches - 1)
    for part in data.split(size * micro):
        plain.zero_grad()
        dense(part).square().mean().backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.8)
        plain.step()
    torch.testing.assert_close(model.weight, dense.weight, rtol=1e-6, atol=1e-9)


def test_norm_matches_dense_model_if_parameter_is_used_in_one_of_two_micro_batches() -> None:
    model, optimizer = linear(accumulation_steps=2)
    data = samples(4)
    model.bias.requires_grad_(False)
    optimizer.backward(F.linear(data[:2], model.weight).square().mean())
    model.bias.requires_grad_(True)
    optimizer.backward(model(data[2:]).square().mean())
    stats = optimizer.step()
    dense, _ = linear()
    (F.linear(data[:2], dense.weight).square().mean() / 2 + dense(data[2:]).square().mean() / 2).backward()
    assert stats is not None
    grads = [param.grad for param in dense.parameters() if param.grad is not None]
    assert float(stats.total_norm) == pytest.approx(float(nn.utils.get_total_norm(grads)), rel=1e-12)


class Forgetful(nn.Linear):
    """Clears gradients in its forward, which breaks accumulation."""

    def forward(self, input: Tensor) -> Tensor:
        for param in self.parameters():
            param.grad = None
        return super().forward(input)


def test_gradients_cleared_in_forward_raise_in_next_backward() -> None:
    torch.manual_seed(7)
    model = Forgetful(4, 3)
    optimizer = ParallelOptimizer(
        torch.optim.SGD(model.parameters()), ProcessGroupRegistry(Topology()), accumulation_steps=2
    )
    optimizer.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    loss = model(torch.ones(1, 4)).sum()
    with pytest.raises(RuntimeError, match="gradients were cleared after micro-batch 1 of this step"):
        optimizer.backward(loss)


def test_optimizer_ignores_zero_grad_within_window_and_raises_after_model_zero_grad() -> None:
    model, optimizer = linear(accumulation_steps=2)
    optimizer.backward(model(samples(1)).sum())
    optimizer.zero_grad()  # has no effect within a window
    assert model.weight.grad is not None
    model.zero_grad()  # clears the gradients, so the next micro-batch raises
    with pytest.raises(RuntimeError, match="gradients were cleared"):
        optimizer.backward(model(samples(1)).sum())


def cleared_under_zero_2() -> str:
    """Between two micro-batches, clear a gradient that ZeRO-2 does not shard. Return the error."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.ParameterDict({"same": nn.Parameter(torch.ones(4)), "split": nn.Parameter(torch.ones(4))})
        declare(model, {"same": P(), "split": P("data")})
        sgd = torch.optim.SGD(model.parameters())
        states = Sharded(gradients=True)
        optimizer = ParallelOptimizer(sgd, registry, states=states, accumulation_steps=2)
        optimizer.backward((model["same"] * model["split"]).sum())
        assert model["same"].grad is None
        model["split"].grad = None
        try:
            optimizer.backward((model["same"] * model["split"]).sum())
        except RuntimeError as error:
            return str(error)
        return ""


def test_clearing_unsharded_gradient_within_window_raises_with_zero2(world: World) -> None:
    for said in world.run(2, cleared_under_zero_2):
        assert "gradients were cleared after micro-batch 1 of this step" in said


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(accumulation_steps=0), "accumulation_steps=0: give a whole number"),
        (lambda: linear(accumulation_steps=1.5), "accumulation_steps=1.5"),
        (lambda: linear()[1].backward(torch.ones((), requires_grad=True), weight=-1), "weight=-1"),
    ],
)
def test_invalid_accumulation_arguments_are_rejected(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_mixing_weighted_and_unweighted_micro_batches_is_rejected() -> None:
    model, optimizer = linear()
    optimizer.backward(model(samples(2)).sum(), weight=2)
    with pytest.raises(ValueError, match="some micro-batches of this step have a weight"):
        optimizer.backward(model(samples(2)).mean())


def wrong_module() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(2, 2)
        declare(model, {"*": P()})
        wrapped = DistributedDataParallel(model)
        given: Any = model if dist.get_rank() == 1 else wrapped
        try:
            ParallelOptimizer(torch.optim.SGD(model.parameters()), registry, data_parallel=given)
        except TypeError as error:
            return str(error)
        return "no error"


def test_plain_module_as_data_parallel_on_one_rank_raises_on_all_ranks(world: World) -> None:
    for message in world.run(2, wrong_module):
        assert "data_parallel=Linear: give the DistributedDataParallel module" in message


@pytest.mark.parametrize("steps", [None, 2])
def test_zero_grad_after_backward_clears_gradients_only_without_accumulation_steps(steps: int | None) -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Linear(2, 1)
        optimizer = ParallelOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), registry, accumulation_steps=steps)
        optimizer.backward(model(torch.ones(1, 2)).sum())
        optimizer.zero_grad()
        assert (model.weight.grad is None) == (steps is None)
