"""Pipelines of torch.distributed.pipelining, stepped as one model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from dtensors import local, registry_of
from fully_sharded import Full
from meshstep.amp import Mode, Precision, TorchFp16
from meshstep.optim import Booster, ParallelOptimizer, Pipeline
from meshstep.parallel import P, ProcessGroupRegistry, shard
from meshstep.parallel.interop.dtensor import keep_specs
from meshstep.parallel.ranks.interface import each
from pipelines import (
    MICRO_BATCHES,
    SCHEDULES,
    TWO,
    ZBV_RUNS,
    Chunk,
    Kind,
    Part,
    Piped,
    batch,
    cross_entropy,
    dense_logits,
    dense_weights,
    full_of,
    schedule_of,
)
from properties import repetitions
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from world import World

MAX_NORM = 0.8
MESH = {"pipe": (("pipe", 2),), "data": (("data", 2), ("pipe", 2)), "tensor": (("pipe", 2), ("tensor", 2))}


class Case(NamedTuple):
    kind: Kind
    tied: bool
    precision: str
    data_parallel: Any = None
    mesh: str = "pipe"
    accumulate: int = 1

    @property
    def steps(self) -> int:
        """Return the number of steps: two or three that are applied, and in fp16 one that is skipped."""
        return {"fp32": 2, "bf16": 3, "fp16": 4}[self.precision]


class Result(NamedTuple):
    """Results of one rank: losses (None except on the last stage), norms, skipped flags, full parameters. `train` appends
    an evaluation loss to the losses."""

    losses: list[float | None]
    norms: list[float]
    skipped: list[bool]
    full: Full


def mode(precision: str) -> Mode | Precision:
    """Return the precision; fp16 starts with a loss scale that overflows."""
    return TorchFp16(init_scale=2.0**18) if precision == "fp16" else precision  # type: ignore[return-value]


def train_each(how: Callable[..., Result], mesh: str, cases: list[Case]) -> list[Result]:
    """Run the cases in the same process groups, so that DTensor reuses its caches for their meshes."""
    with registry_of((*MESH[mesh], *(() if mesh == "tensor" else (("tensor", 1),)))) as registry:
        return each(how, [(case, registry) for case in cases])


def train(case: Case, registry: ProcessGroupRegistry) -> Result:
    piped = Piped(case.kind, case.tied, MESH[case.mesh])
    part = Part(piped, registry)
    sgd = torch.optim.SGD(part.parameters(), lr=0.3, momentum=0.9, fused=True)
    booster = Booster(
        mode(case.precision),
        registry,
        case.data_parallel,
        max_norm=MAX_NORM,
        accumulation_steps=case.accumulate,
    )
    pipeline, optimizer, *_ = booster.boost(schedule_of(piped, part, registry), sgd)
    data_axes, losses, norms, skipped = registry.topology.data_axes, [], [], []
    for step in range(case.steps):
        for micro in range(case.accumulate):
            inputs, targets = (
                shard(t, P(data_axes), registry) for t in batch(step + 10 * micro, registry.topology.size(*data_axes))
            )
            loss = pipeline.backward(inputs, target=targets)
            stats = optimizer.step()
        assert stats is not None
        optimizer.zero_grad()
        losses.append(None if loss is None else float(loss))
        norms.append(float(stats.total_norm))
        skipped.append(bool(stats.found_inf))
    before = local_weights(pipeline)
    inputs, targets = (shard(t, P(data_axes), registry) for t in batch(99, registry.topology.size(*data_axes)))
    evaluated = pipeline.evaluate(inputs, target=targets)
    assert torch.equal(before, local_weights(pipeline))
    losses.append(None if evaluated is None else float(evaluated))
    return Result(losses, norms, skipped, full_of(pipeline.modules, part, registry))


def local_weights(pipeline: Pipeline) -> Tensor:
    return torch.cat([local(param).flatten().float() for module in pipeline.modules for param in module.parameters()])


@cache
def dense(
    tied: bool, data_ranks: int, skipped: tuple[bool, ...], accumulate: int = 1
) -> tuple[list[float], list[float], Full]:
    """Train in float64 in one process. Return losses, norms and parameters."""
    weights = {name: w.requires_grad_() for name, w in dense_weights().items() if not (tied and name == "head")}
    sgd = torch.optim.SGD(weights.values(), lr=0.3, momentum=0.9)
    losses, norms = [], []
    for step, skip in enumerate(skipped):
        sgd.zero_grad()
        for micro in range(accumulate):
            inputs, targets = batch(step + 10 * micro, data_ranks)
            loss = cross_entropy(dense_logits(weights, inputs), targets)
            (loss / accumulate).backward()
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)))
        losses.append(loss.item())
        if not skip:
            sgd.step()
    losses.append(cross_entropy(dense_logits(weights, batch(99, data_ranks)[0]), batch(99, data_ranks)[1]).item())
    return losses, norms, {name: weight.detach() for name, weight in weights.items()}


TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


def assert_is_dense(case: Case, results: list[Result]) -> None:
    skipped = results[0].skipped
    assert all(result.skipped == skipped for result in results), "skipped steps differ between ranks"
    data_ranks = 2 if case.mesh == "data" else 1
    losses, norms, weights = dense(case.tied, data_ranks, tuple(skipped), case.accumulate)
    tolerance = TOLERANCE[case.precision]
    begun = dense_weights()
    moved = max(float((weights[name] - begun[name]).abs().max()) for name in weights)
    assert moved > 0.1, "the weights must change"
    for result in results:
        taken = [(found, norm) for found, norm, skip in zip(result.norms, norms, skipped, strict=True) if not skip]
        assert [found for found, _ in taken] == pytest.approx([norm for _, norm in taken], rel=tolerance)
        for name, weight in result.full.items():
            expected = weights["table" if case.tied and name == "head" else name]
            assert weight.shape == expected.shape
            worst = float((weight.double() - expected).abs().max())
            assert worst < tolerance * moved, f"{case}: {name} is off by {worst} of {moved}"
    seen = {name for result in results for name in result.full} - ({"head"} if case.tied else set())
    assert seen == weights.keys()
    for step in range(len(results[0].losses)):
        of_data_ranks = [found for result in results if (found := result.losses[step]) is not None]
        assert len(of_data_ranks) == len(results) // 2, "only the last stage must have the loss"
        assert torch.tensor(of_data_ranks).mean().item() == pytest.approx(losses[step], rel=tolerance)


def train_by_hand(case: Case, registry: ProcessGroupRegistry) -> Result:
    """Train without a Booster. This function itself calls `fully_shard` and passes the stages as ``data_parallel``."""
    piped = Piped(case.kind, case.tied, MESH[case.mesh])
    part = Part(piped, registry)
    schedule = schedule_of(piped, part, registry, loss_fn=loss_sum, scale_grads=False)
    chunks = [stage.submod for stage in getattr(schedule, "_stages", None) or [schedule._stage]]
    shared = {part.table} if case.tied and len({0, piped.stages - 1} & {*part.own}) == 2 else set()
    mesh = registry.device_mesh("data")
    for chunk in chunks:
        with keep_specs(chunk):
            for module in (*chunk.blocks, chunk):
                fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=shared)
    params = list(dict.fromkeys(param for chunk in chunks for param in chunk.parameters()))
    sgd = torch.optim.SGD(params, lr=0.3, momentum=0.9, fused=True)
    optimizer = ParallelOptimizer(sgd, registry, max_norm=MAX_NORM, data_parallel=chunks, accumulation_steps=2)
    pipeline = Pipeline(schedule, optimizer)
    losses, norms = [], []
    for step in range(case.steps):
        for micro in range(2):
            inputs, targets = (shard(t, P("data"), registry) for t in batch(step + 10 * micro, 2))
            loss = pipeline.backward(inputs, target=targets, weight=targets.numel())
            stats = optimizer.step()
        assert stats is not None
        optimizer.zero_grad()
        losses.append(None if loss is None else float(loss) / targets.numel())
        norms.append(float(stats.total_norm))
    return Result(losses, norms, [False] * case.steps, full_of(pipeline.modules, part, registry))


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets) * targets.numel()


def test_pipeline_with_fully_shard_and_micro_batch_weights_matches_dense_model(world: World) -> None:
    cases = [Case(kind, tied, "fp32", "fsdp", "data", 2) for kind in TWO for tied in (False, True)]
    assert_all_are_dense(world, cases, train_by_hand)


def assert_all_are_dense(
    world: World, cases: list[Case], how: Callable[..., Result] = train
) -> dict[Case, list[Result]]:
    found: dict[Case, list[Result]] = {}
    for mesh in MESH:
        those = [case for case in cases if case.mesh == mesh]
        if those:
            by_rank = world.run(2 if mesh == "pipe" else 4, train_each, how, mesh, those)
            found.update(zip(those, map(list, zip(*by_rank, strict=True)), strict=True))
    for case in cases:
        assert_is_dense(case, found[case])
    return found


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
def test_pipeline_schedules_match_dense_model(sharded: bool, world: World) -> None:
    how = {"data_parallel": "fsdp", "mesh": "data"} if sharded else {}
    cases = [
        Case(kind, tied, precision, **how)  # type: ignore[arg-type]
        for tied in (False, True)
        for precision in ("fp32", "fp16")
        # The default run has only two schedules here, because the next tests run all of them.
        for kind in repetitions(list(SCHEDULES), sharded, tied, precision, default=2)
    ]
    found = assert_all_are_dense(world, cases)
    in_fp16 = [results[0].skipped for case, results in found.items() if case.precision == "fp16"]
    assert all(True in skipped and False in skipped for skipped in in_fp16), "some steps must overflow, but not all"


@pytest.mark.long
def test_pipelines_with_tensor_parallel_stages_or_zero_match_dense_model(world: World) -> None:
    cases = [Case(kind, tied=True, precision="fp32", mesh="tensor") for kind in SCHEDULES]
    cases += [Case(kind, True, "fp32", how, "data") for kind in TWO for how in (None, "zero1", "zero2")]
    cases += [Case(kind, True, "bf16", how, "data") for kind in TWO for how in (None, "zero2")]
    assert_all_are_dense(world, cases)


@pytest.mark.long
def test_accumulation_over_several_pipeline_calls_matches_dense_model(world: World) -> None:
    cases = [Case(kind, True, "fp32", None, accumulate=2) for kind in SCHEDULES]
    cases += [Case(kind, True, "fp32", how, "data", 2) for kind in TWO for how in ("zero2", "fsdp")]
    assert_all_are_dense(world, cases)


# Errors ---------------------------------------------------------------------------------------------------------------


def error_of_torchs_division(kind: Kind, tied: bool, accumulate: int) -> str:
    """Run a schedule with torch's own gradient scaling. Return the error, or "" if the norm is that of the dense model."""
    piped = Piped(kind, tied)
    with registry_of((("pipe", 2), ("tensor", 1))) as registry:
        part = Part(piped, registry)
        sgd = torch.optim.SGD(part.parameters(), lr=0.3, fused=True)
        optimizer = ParallelOptimizer(sgd, registry)
        schedule = schedule_of(piped, part, registry)
        first, last = 0 in part.own, piped.stages - 1 in part.own
        for micro in range(accumulate):
            inputs, targets = batch(10 * micro)
            with optimizer.window():
                schedule.step(*([inputs] if first else []), target=targets if last else None)
        try:
            stats = optimizer.step()
        except RuntimeError as error:
            return str(error)
        assert stats is not None
        _, norms, _ = dense(tied, 1, (False,))
        assert float(stats.total_norm) == pytest.approx(norms[0], rel=1e-5)
        return ""


def test_pipeline_schedule_that_divides_gradients_twice_raises_on_every_rank(world: World) -> None:
    cases: list[tuple[Kind, bool, int]] = [("1f1b", True, 1), ("1f1b", False, 2)]
    cases += [("zbv", False, 1), ("zbv", True, 1)] if ZBV_RUNS else []
    right, accumulated, *in_a_v = world.run_each(error_of_torchs_division, [(2, case) for case in cases])
    assert right == ["", ""]
    assert in_a_v[:1] == [["", ""]] * ZBV_RUNS
    for message in (*accumulated, *(message for messages in in_a_v[1:] for message in messages)):
        assert "a pipeline schedule with scale_grads=True has divided gradients twice" in message


def refusals(case: str) -> str:
    piped = Piped("interleaved zero bubble" if case == "ddp" else "1f1b", tied=False, axes=MESH["data"])
    with registry_of((("data", 2), ("pipe", 2), ("tensor", 1))) as registry:
        part = Part(piped, registry)
        sgd = torch.optim.SGD(part.parameters(), lr=0.3)
        schedule: Any = schedule_of(piped, part, registry, **({"loss_fn": None} if case == "no loss" else {}))
        if case == "group":
            chunk = Chunk(part, registry.coordinate["pipe"], 2)
            stage = PipelineStage(
                chunk, registry.coordinate["pipe"], 2, torch.device("cpu"), group=registry.group("data")
            )
            schedule = SCHEDULES["1f1b"](stage, MICRO_BATCHES, loss_fn=cross_entropy)
        if case == "ddp":
            for stage in schedule._stages:
                stage.submod = nn.parallel.DistributedDataParallel(stage.submod, process_group=registry.group("data"))
        try:
            if case == "by name":
                Booster("fp32", registry, "ddp").boost(schedule, sgd)
            elif case == "weight":
                Booster("fp32", registry).boost(schedule, sgd)[0].backward(batch(0)[0], target=batch(0)[1], weight=3.0)
            elif case in ("uneven", "no schedule"):
                optimizer = ParallelOptimizer(sgd, registry)
                Pipeline(schedule if case == "uneven" else part, optimizer).backward(*batch(0)[0][None, :6])  # type: ignore[arg-type]
            else:
                Booster("fp32", registry).boost(schedule, sgd)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("no loss", "has no loss_fn"),
        ("group", r"give PipelineStage(..., group=registry.group('pipe'))"),
        ("ddp", "so DistributedDataParallel would never average them"),
        ("by name", "give None, 'zero1', 'zero2' or 'fsdp'"),
        ("uneven", "(drop_last=True). If the samples are not along dim 0, create the schedule with chunk specs"),
        ("weight", "create the schedule with scale_grads=False"),
        ("no schedule", "give a schedule of torch.distributed.pipelining"),
    ],
)
def test_invalid_pipeline_arguments_are_rejected_on_every_rank(case: str, match: str, world: World) -> None:
    for message in world.run(4, refusals, case):
        assert match in message
