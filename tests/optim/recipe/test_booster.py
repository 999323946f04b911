"""`Booster` with each form of data parallelism and each precision, compared with runs in a single process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshstep.amp import ApexFp16, Mode
from meshstep.optim import Booster, LinearWarmupLR, save_checkpoint
from meshstep.parallel import (
    ColumnParallelLinear,
    P,
    ProcessGroupRegistry,
    RowParallelLinear,
    Topology,
    declare,
    spec_of,
    unshard,
)
from meshstep.parallel.interop.local_parameters import local_parameter
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_lr
from torch.utils.data import TensorDataset
from world import World, WorldError

MODES: tuple[Any, ...] = (None, "ddp", "zero1", "zero2", "fsdp")
IN, HIDDEN, CLASSES = 16, 64, 16


class Block(nn.Module):
    """x + MLP(norm(x)), with the two linear layers sharded over `tensor` if the mesh has that axis."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        split = "tensor" in registry.topology.axes
        self.norm = nn.LayerNorm(IN)
        self.up = ColumnParallelLinear(IN, HIDDEN, registry) if split else nn.Linear(IN, HIDDEN)
        self.down = RowParallelLinear(HIDDEN, IN, registry) if split else nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def make_model(registry: ProcessGroupRegistry, seed: int = 3) -> nn.Module:
    """Return two blocks and a head with the same full weights on every mesh."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(registry), Block(registry), nn.Linear(IN, CLASSES))
    if "tensor" in registry.topology.axes:
        declare(model, {"*.norm.*": P(), "2.*": P()})
    return model


def samples(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, IN, generator=generator).to(dtype), torch.randint(CLASSES, (count,), generator=generator)


def full_weights(model: nn.Module, registry: ProcessGroupRegistry) -> dict[str, Tensor]:
    """Return the full parameters in float64 by name, for every form of data parallelism."""
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    local = {name: local_parameter(param) for name, param in bare.named_parameters()}
    return {name: unshard(param.detach(), spec_of(param), registry).double() for name, param in local.items()}


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


# The same steps with every form of data parallelism -------------------------------------------------------------------

BATCHES, BATCH, EPOCHS, WINDOW = 5, 8, 2, 2
Run = tuple[Tensor, list[float], list[float]]  # weights, learning rates, norms


def plain_run() -> Run:
    """Train with torch only in one process, on full windows of two batches and a last window of one.

    Return parameters, rates and norms.
    """
    model = make_model(ProcessGroupRegistry(Topology())).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch_lr.CosineAnnealingLR(optimizer, 6)
    inputs, labels = samples(BATCHES * BATCH, torch.float64)
    rates, norms = [], []
    for _ in range(EPOCHS):
        for x, y in zip(inputs.split(WINDOW * BATCH), labels.split(WINDOW * BATCH), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.5)))
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
    return flat({name: param.detach() for name, param in model.named_parameters()}), rates, norms


def boosted_run(mode: Any, axes: dict[str, int], windows: str) -> Run:
    """Train on a mesh, per micro-batch. Data ranks start with different weights, which `boost` must synchronize.

    Return full parameters, rates and norms.
    """
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        data_rank, data_ranks = registry.rank(*registry.topology.data_axes), registry.size(*registry.topology.data_axes)
        model = make_model(registry, seed=3 + data_rank).double()
        adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
        cosine = torch_lr.CosineAnnealingLR(adamw, 6)
        booster = Booster("fp32", registry, mode, 1.5, WINDOW if windows == "managed" else 1)
        dataset = TensorDataset(*samples(BATCHES * BATCH, torch.float64))
        prepared = booster.prepare_dataloader(dataset, BATCH // data_ranks)
        model, optimizer, criterion, loader, schedule = booster.boost(model, adamw, F.cross_entropy, prepared, cosine)
        rates, norms = [], []
        for _ in range(EPOCHS):
            for index, (x, y) in enumerate(loader):
                ends = index % WINDOW == WINDOW - 1 or index == BATCHES - 1
                if windows == "managed":
                    if ends:
                        optimizer.mark_last_micro_batch()
                    booster.backward(criterion(model(x), y), optimizer)
                else:
                    with nullcontext() if ends else booster.no_sync(model):
                        booster.backward(criterion(model(x), y) / (1 if index == BATCHES - 1 else WINDOW), optimizer)
                if ends:
                    stats = optimizer.step(final=True)
                    assert stats is not None
                    norms.append(float(stats.total_norm))
                    rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.zero_grad()
                    schedule.step()
        return flat(full_weights(model, registry)), rates, norms


@pytest.fixture(scope="module")
def plain() -> Run:
    weights, rates, norms = plain_run()
    assert min(norms) < 1.5 < max(norms), "some steps must be clipped, but not all"
    return weights, rates, norms


TWO_AXES: list[dict[str, int]] = [{"data": 2, "tensor": 2}, {"replica": 2, "data": 2}]


@pytest.mark.parametrize("windows", ["managed", "own"])
@pytest.mark.parametrize("mode", MODES)
def test_boosted_run_matches_plain_run_in_every_data_parallel_mode(
    mode: Any, windows: str, world: World, plain: Run
) -> None:
    """The runs use accumulation windows with a shorter last one, AdamW, clipping and torch's cosine schedule."""
    for run in world.run(2, boosted_run, mode, {"data": 2}, windows):
        assert_same(run, plain)


@pytest.mark.parametrize("axes", TWO_AXES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_boosted_run_matches_plain_run_on_two_mesh_axes(
    mode: Any, axes: dict[str, int], world: World, plain: Run
) -> None:
    for run in world.run(4, boosted_run, mode, axes, "managed"):
        assert_same(run, plain)


def test_boosted_run_in_one_process_matches_plain_run(plain: Run) -> None:
    for mode in MODES:
        assert_same(boosted_run(mode, {"data": 1}, "managed"), plain)


def assert_same(run: Run, plain: Run) -> None:
    torch.testing.assert_close(run[0], plain[0], rtol=0, atol=1e-11)
    assert run[1] == plain[1]
    assert run[2] == pytest.approx(plain[2], rel=1e-10)


# Precision x mesh x data parallelism ----------------------------------------------------------------------------------

# Allowed error of the update of 3 steps, relative to the norm of the float32 update. Most of the error comes from
# rounding the weights.
ROUNDING = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 0.3, "fp16_naive": 0.05, "fp16_apex": 0.05, "fp8": 0.3}


def three_steps(precision: Mode, axes: dict[str, int], modes: tuple[Any, ...]) -> list[tuple[Tensor, int]]:
    """Return the update of the full weights and the number of skipped steps for each form of data parallelism."""
    found = []
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        for mode in modes:
            model = make_model(registry)
            before = flat(full_weights(model, registry)) if registry.topology.model_axes else None
            booster = Booster(precision, registry, mode)
            sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model, optimizer, criterion, _, _ = booster.boost(model, sgd, nn.CrossEntropyLoss())
            before = flat(full_weights(model, registry)) if before is None else before
            rank, ranks = registry.rank("data"), registry.size("data")
            for x, y in zip(*(part.split(16) for part in samples(48)), strict=True):
                optimizer.zero_grad()
                booster.backward(criterion(model(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]), optimizer)
                optimizer.clip_grad_by_norm(max_norm=0.5)
                optimizer.step()
            found.append((flat(full_weights(model, registry)) - before, optimizer.skipped_steps))
    return found


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("precision", ROUNDING)
def test_update_matches_float32_within_rounding_in_every_precision_and_data_parallel_mode(
    precision: Mode, axes: dict[str, int], world: World
) -> None:
    [(dense, _)] = three_steps("fp32", {"data": 1}, (None,))
    for results in world.run(len(axes) * 2, three_steps, precision, axes, MODES):
        for mode, (update, skipped) in zip(MODES, results, strict=True):
            assert relative(update, dense) < ROUNDING[precision], mode
            assert relative(update, results[0][0]) < ROUNDING[precision] / 5, f"{mode} differs from {MODES[0]}"
            assert skipped == 0


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


class Convolutions(nn.Module):
    """Convolutions with batch norm, which fp16_apex keeps in float32 among float16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2))
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]


def two_dtypes(mode: Any) -> Tensor:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model: nn.Module = Convolutions()
        booster = Booster(ApexFp16("O2"), registry, mode)
        model, optimizer, _, _, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dtypes = {local_parameter(param).dtype for param in model.parameters()}
        assert dtypes == {torch.float16, torch.float32}
        booster.backward(model(torch.randn(4, 4, 8, 8)).square().mean(), optimizer)
        optimizer.step()
        return flat(full_weights(model, registry))


def test_fully_shard_of_parameters_with_two_dtypes_matches_unsharded_step(world: World) -> None:
    """torch requires that all trainable parameters of a fully_shard group have one dtype."""
    for sharded, plain in zip(world.run(2, two_dtypes, "fsdp"), world.run(2, two_dtypes, None), strict=True):
        torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-6)


# Saving ---------------------------------------------------------------------------------------------------------------


def train_in_parts(path: str, mode: Any, stop: int | None, axes: dict[str, int]) -> tuple[Tensor, Any]:
    """Train until step 8, in 2 epochs. Save after step ``stop``; if ``stop`` is None, continue from the checkpoint.

    Return the full weights, and the loaded extra value, or 0.
    """
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        model = make_model(registry, seed=3 if stop else 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        lr_scheduler = LinearWarmupLR(optimizer, total_steps=8, warmup_steps=2)
        booster = Booster("bf16", registry, mode, max_norm=1.0)
        loader = booster.prepare_dataloader(TensorDataset(*samples(32)), 4, shuffle=True, seed=1)
        boosted = booster.boost(model, optimizer, F.cross_entropy, loader, lr_scheduler)
        model, stepped, criterion, loader, lr_scheduler = boosted
        done = extra = 0 if stop else booster.load(path, model, stepped, lr_scheduler, loader)
        while done < 8:
            for x, y in loader:
                booster.backward(criterion(model(x), y), stepped)
                stepped.step()
                lr_scheduler.step()
                stepped.zero_grad()
                done += 1
                if done == stop:
                    booster.save(path, model, stepped, lr_scheduler, loader, extra=done)
        return flat(full_weights(model, registry)), extra


@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_boosted_run_resumes_bitwise_identically(mode: Any, world: World, tmp_path: Path) -> None:
    """The checkpoint within an epoch contains weights, master weights, optimizer state, learning rate and sample order."""
    path = str(tmp_path)
    whole = world.run(2, train_in_parts, path, mode, 6, {"data": 2})
    for (weights, _), (resumed, done) in zip(
        whole, world.run(2, train_in_parts, path, mode, None, {"data": 2}), strict=True
    ):
        assert done == 6
        assert torch.equal(weights, resumed)


# Options passed to the optimizer --------------------------------------------------------------------------------------


def vetoed(mode: Any) -> tuple[list[bool], int, int]:
    """Reject the second of three steps on rank 1. Return which steps changed weights, the number of rejected steps, and
    the number of calls of ``commit``."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        asked: list[int] = []

        def commit() -> bool:
            asked.append(len(asked))
            return registry.global_rank == 0 or asked[-1] != 1

        model = make_model(registry)
        booster = Booster("bf16", registry, mode, max_norm=0.5, accumulation_steps=2, commit=commit)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer, criterion, _, _ = booster.boost(model, sgd, nn.CrossEntropyLoss())
        moved = []
        for x, y in zip(*(part.split(16) for part in samples(48)), strict=True):
            before = [local_parameter(param).clone() for param in model.parameters()]
            optimizer.zero_grad()
            for micro in range(2):
                at = 2 * micro + registry.rank("data")
                booster.backward(criterion(model(x.chunk(4)[at]), y.chunk(4)[at]), optimizer)
                optimizer.step()
            pairs = zip(model.parameters(), before, strict=True)
            moved.append(any(not torch.equal(local_parameter(param), was) for param, was in pairs))
        return moved, optimizer.rejected_steps, len(asked)


@pytest.mark.parametrize("mode", MODES)
def test_step_rejected_by_commit_is_skipped_in_every_data_parallel_mode(world: World, mode: Any) -> None:
    assert world.run(2, vetoed, mode) == [([True, False, True], 1, 3)] * 2


def test_commit_that_is_not_callable_is_rejected_on_every_rank(world: World) -> None:
    with pytest.raises(WorldError, match=r"(?s)2 of 2 ranks failed.*commit=False: give a function without arguments"):
        world.run(2, boosted_with, False)


def boosted_with(commit: Any) -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = make_model(registry)
        Booster("fp32", registry, commit=commit).boost(model, torch.optim.SGD(model.parameters(), lr=0.05))


# Several optimizers ------------------------------------------------------------------------------------------------------


def two_rates_run(mode: Any, several: bool) -> tuple[Tensor, list[float]]:
    """Return weights and norms of steps with different learning rates for matrices and other parameters."""
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = make_model(registry)
        groups: list[dict[str, Any]] = [
            {"params": [param for param in model.parameters() if (param.dim() == 2) == is_matrix], "lr": lr}
            for is_matrix, lr in ((True, 0.02), (False, 0.005))
        ]
        optimizers: Any = [torch.optim.AdamW([group]) for group in groups] if several else torch.optim.AdamW(groups)
        booster = Booster("bf16", registry, mode, max_norm=0.1)
        model, optimizer, criterion, *_ = booster.boost(model, optimizers, F.cross_entropy)
        norms = []
        for step in range(3):
            inputs, labels = (part.chunk(2)[registry.rank("data")] for part in samples(BATCH + 2 * step))
            optimizer.zero_grad()
            booster.backward(criterion(model(inputs), labels), optimizer)
            norms.append(float(optimizer.step().total_norm))
        return flat(full_weights(model, registry)), norms


@pytest.mark.parametrize("mode", MODES)
def test_two_boosted_optimizers_match_one_with_two_param_groups_bitwise(world: World, mode: Any) -> None:
    for (mine, norms), (its, expected) in zip(
        world.run(2, two_rates_run, mode, True), world.run(2, two_rates_run, mode, False), strict=True
    ):
        assert norms == expected
        assert min(norms) > 0.1  # so the steps were clipped
        assert torch.equal(mine, its)


def test_booster_loads_a_checkpoint_of_save_checkpoint(tmp_path: Path) -> None:
    """`Booster.load` returns the saved ``extra``, even a dict with one of the keys that `Booster.save` writes."""
    registry = ProcessGroupRegistry(Topology())
    for number, extra in enumerate((None, 7, {"extra": 1, "step": 2})):
        saved, loaded = (nn.Linear(3, 2) for _ in range(2))
        boosters = [Booster("fp32", registry) for _ in range(2)]
        (_, first, *_), (_, second, *_) = (
            booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for booster, model in zip(boosters, (saved, loaded), strict=True)
        )
        save_checkpoint(tmp_path / str(number), saved, first, extra=extra)
        assert boosters[1].load(tmp_path / str(number), loaded, second) == extra
        assert torch.equal(saved.weight, loaded.weight)
