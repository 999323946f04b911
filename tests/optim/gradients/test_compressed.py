"""Gradient compression to bfloat16: bytes sent, error feedback, dtypes, overlap, skipped steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshstep.amp import NaiveFp16
from meshstep.optim import Bf16Compression, Booster, ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.mesh.process_group_collectives import REDUCE_SCATTER, all_gather_flat
from optimizers import adamw
from overlap_runs import train_replicas
from precision_modes import MODES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import World
from zero_models import wide_model

# How gradients are reduced: all-reduce in the step or during backward, reduce-scatter in the step or during backward.
WAYS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "overlap": {"overlap": True},
    "ZeRO-1": {"gradients": False},
    "ZeRO-2": {"gradients": True},
}


def arguments(way: str, compression: Any, bucket_bytes: int | None = None) -> dict[str, Any]:
    options = WAYS[way]
    if way.startswith("ZeRO"):
        return {"states": Sharded("data", compression=compression, **options)}
    return {"compression": compression, "bucket_bytes": bucket_bytes, **options}


# Compressed sums of flat buffers --------------------------------------------------------------------------------------


def given(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(48, generator=generator) for _ in range(count)]


def summed(scatter: bool, feedback: bool) -> list[Tensor]:
    """Return the compressed sums over the ranks of eight successive flat buffers, by all-reduce, or with ``scatter`` by
    reduce-scatter and all-gather."""
    wire, memory = Bf16Compression(feedback), {}  # type: ignore[var-annotated]
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    sums = []
    for flat in given(dist.get_rank(), 8):
        before = flat.clone()
        if scatter:
            own, whole = torch.empty(48 // ranks), torch.empty(48)
            wire.reduce_scatter(own, flat, group, memory)()
            assert torch.equal(flat, before)  # flat may alias a parameter's gradient
            all_gather_flat(whole, own, group)
            sums.append(whole)
        else:
            wire.all_reduce(flat, group, memory)()
            sums.append(flat)
    assert set(memory) == ({"lost"} if feedback else set())
    return sums


def reference_bf16_wire(rounds: list[list[Tensor]], error_feedback: bool) -> list[Tensor]:
    """Return for each round the sum over ranks of ``rounds[t][r]`` rounded to bfloat16."""
    lost = [torch.zeros_like(flat) for flat in rounds[0]]
    sums = []
    for flats in rounds:
        sent_flats = [flat + late if error_feedback else flat for flat, late in zip(flats, lost, strict=True)]
        lost = [flat - flat.bfloat16().float() for flat in sent_flats]
        sums.append(torch.stack([flat.bfloat16().double() for flat in sent_flats]).sum(0))
    return sums


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_compressed_sums_match_reference_with_rounded_gradients(world: World, ranks: int, scatter: bool) -> None:
    for feedback in (True, False):
        rounds = [list(flats) for flats in zip(*(given(rank, 8) for rank in range(ranks)), strict=True)]
        expected = reference_bf16_wire(rounds, feedback)
        found = world.run(ranks, summed, scatter, feedback)
        for sums in found:
            assert all(torch.equal(one, other) for one, other in zip(sums, found[0], strict=True))
            for one, other in zip(sums, expected, strict=True):
                # The sum is rounded to bfloat16, by at most 2^-8 of its value for every added rank; the reference is not.
                assert ((one - other).abs().max() / other.abs().max()) <= (ranks - 1) * 2**-8


# Bytes ----------------------------------------------------------------------------------------------------------------


@contextmanager
def sent() -> Iterator[dict[str, int]]:
    """Count the bytes passed to reducing collectives, by dtype."""
    seen: dict[str, int] = {}

    def counted(original: Any, index: int, *args: Any, **options: Any) -> Any:
        seen[str(args[index].dtype)] = seen.get(str(args[index].dtype), 0) + args[index].nbytes
        return original(*args, **options)

    with (
        mock.patch.object(dist, "all_reduce", partial(counted, dist.all_reduce, 0)),
        mock.patch.object(dist, REDUCE_SCATTER, partial(counted, getattr(dist, REDUCE_SCATTER), 1)),
    ):
        yield seen


def sent_bytes(way: str, mode: str, compressed: bool) -> dict[str, int]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(mode, torch.bfloat16)
        model = wide_model().to(dtype)
        declare(model, {"*": P()})
        precision = MODES["fp32" if mode == "fp64" else mode]
        options = arguments(way, Bf16Compression() if compressed else None, bucket_bytes=16384)
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, precision=precision, **options)
        with sent() as seen:
            optimizer.backward(model(torch.randn(8, 64, dtype=dtype)).float().square().mean())
            optimizer.step()
        return seen


@pytest.mark.parametrize("way", WAYS)
def test_compression_halves_bytes_of_float32_gradients(world: World, way: str) -> None:
    for mode in ("fp32", "bf16"):  # with master weights, bfloat16 parameters have float32 gradients
        plain, half = world.run(2, sent_bytes, way, mode, False)[0], world.run(2, sent_bytes, way, mode, True)[0]
        norm = plain.pop("torch.float64")
        assert half == {"torch.bfloat16": plain["torch.float32"] // 2, "torch.float64": norm}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["fp64", "bf16 stochastic"])
def test_float64_and_bfloat16_gradients_are_not_compressed(world: World, way: str, mode: str) -> None:
    assert world.run(2, sent_bytes, way, mode, True) == world.run(2, sent_bytes, way, mode, False)


# Training ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16_naive"])
@pytest.mark.parametrize("how", ["plain", "unused", "explicit", "added", "offloaded"])
def test_compressed_training_is_bitwise_identical_with_and_without_overlap(world: World, mode: str, how: str) -> None:
    expected = world.run(2, train_replicas, 2, mode, how, False, Bf16Compression())
    for one, other in zip(world.run(2, train_replicas, 2, mode, how, True, Bf16Compression()), expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
        assert all(torch.equal(one[name], expected[0][name]) for name in other)


def losses(way: str, compression: Any, steps: int = 120) -> tuple[float, Tensor]:
    """Train a small classifier on two ranks. Return its loss and its weights."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(7)
        teacher, model = nn.Linear(16, 8), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, fused=True)
        optimizer = ParallelOptimizer(inner, registry, max_norm=1.0, **arguments(way, compression, bucket_bytes=1024))
        x = torch.randn(256, 16)
        targets = teacher(x).argmax(1)
        for step in range(steps):
            rows = torch.arange(256)[step % 4 * 64 : step % 4 * 64 + 64].chunk(2)[registry.global_rank]
            optimizer.zero_grad()
            optimizer.backward(F.cross_entropy(model(x[rows]), targets[rows]))
            optimizer.step()
        weights = torch.cat([param.detach().view(-1) for param in model.parameters()])
        with torch.no_grad():
            return float(F.cross_entropy(model(x), targets)), weights


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_compressed_training_reaches_loss_of_uncompressed_training(world: World, way: str) -> None:
    (exact, target), (with_feedback, weights) = (world.run(2, losses, way, e)[0] for e in (None, Bf16Compression()))
    assert exact < 0.2
    assert with_feedback == pytest.approx(exact, rel=0.005)  # measured: 2e-4
    assert float((weights - target).norm() / target.norm()) < 0.005  # measured: 1e-3


def drift(way: str, feedback: bool) -> float:
    """Return how far a weight moves in 64 steps with gradients that alternate between 256.5 and -255.5 on one rank."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(model.weight)
        declare(model, {"*": P()})
        inner = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
        optimizer = ParallelOptimizer(inner, registry, **arguments(way, Bf16Compression(feedback)))
        for step in range(64):
            optimizer.zero_grad()
            gradient = (-1) ** step * 256.0 + 0.5 if registry.global_rank == 0 else 0.0
            optimizer.backward((model.weight * 2 * gradient).sum())
            optimizer.step()
        return -float(model.weight.detach().mean())


@pytest.mark.parametrize("way", WAYS)
def test_error_feedback_recovers_rounding_errors(world: World, way: str) -> None:
    assert world.run(2, drift, way, True) == [pytest.approx(32.0, abs=2.0)] * 2
    assert world.run(2, drift, way, False) == [pytest.approx(0.0, abs=2.0)] * 2  # the negative control


def overflown(way: str) -> list[bool]:
    """Return per step whether the weights changed; the second step has a non-finite gradient."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model, mode = wide_model().half(), NaiveFp16(init_scale=4.0)
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(
            adamw(model.parameters()), registry, precision=mode, **arguments(way, Bf16Compression())
        )
        moved = []
        for step in range(3):
            optimizer.zero_grad()
            before = torch.cat([param.detach().view(-1) for param in model.parameters()])
            loss = model(torch.randn(8, 64).half()).float().square().mean()
            optimizer.backward(loss * (inf if step == 1 and registry.global_rank else 1.0))
            optimizer.step()
            after = torch.cat([param.detach().view(-1) for param in model.parameters()])
            assert bool(after.isfinite().all())
            moved.append(not torch.equal(before, after))
        return moved


@pytest.mark.parametrize("way", WAYS)
def test_skipped_step_leaves_no_nonfinite_error_feedback(world: World, way: str) -> None:
    assert world.run(2, overflown, way) == [[True, False, True]] * 2


def step_beside_ddp(compression: Bf16Compression | None) -> float:
    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        declare(model, {"*": P(partial="tensor")})
        ddp = DistributedDataParallel(model, process_group=registry.group("data"))
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = ParallelOptimizer(sgd, registry, data_parallel=ddp, compression=compression, bucket_bytes=64)
        optimizer.backward(ddp(torch.tensor([[1 + 2.0**-10]])).sum())
        optimizer.step()
        return -float(model.weight)


def test_partial_gradients_with_ddp_are_compressed(world: World) -> None:
    assert world.run(4, step_beside_ddp, None) == [2 + 2.0**-9] * 4
    assert world.run(4, step_beside_ddp, Bf16Compression()) == [2.0] * 4


def placements_of_booster(mode: Any) -> list[Any]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = wide_model()
        booster = Booster("fp32", registry, mode, compression=Bf16Compression())
        _, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
        assert optimizer._setup.compression == Bf16Compression()
        placements: list[Any] = optimizer._setup.placements
        return placements


def test_booster_passes_compression_to_optimizer_and_sharded_states(world: World) -> None:
    assert world.run(2, placements_of_booster, "zero1") == [[Sharded("data", compression=Bf16Compression())]] * 2
    assert world.run(2, placements_of_booster, None) == [[]] * 2
