"""Rare orders of calls and uneven ranks: the right numbers or an error that says what to do, never something in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.amp import ApexFp16, TorchFp16
from meshstep.optim import ParallelOptimizer, PolynomialLR
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from optimizers import arguments
from torch import Tensor, nn
from world import World
from zero_models import ZERO1, ZERO2, small_buckets

EVERYWHERE: list[dict[str, Any]] = [{}, ZERO1, ZERO2, {"offload": 1.0}]


def parameter(
    name: str, numel: int = 4, spec: P | None = None, trained: bool = True, value: float = 0.0
) -> nn.Parameter:
    param = nn.Parameter(torch.full((numel,), value), requires_grad=trained)
    annotate(param, spec or P(), name)
    return param


def sgd(params: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def alone() -> ProcessGroupRegistry:
    return ProcessGroupRegistry(Topology())


# Windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", TorchFp16(init_scale=1024.0)])
def test_a_groups_own_threshold_and_a_clip_value(precision: Any) -> None:
    a, b = parameter("a"), parameter("b")
    groups = [{"params": [a]}, {"params": [b], "max_norm": 1.0}]
    optimizer = ParallelOptimizer(sgd(groups), alone(), **arguments(clip_value=2.0, precision=precision))
    optimizer.backward((a * 3).sum() + (b * 3).sum())
    optimizer.step()
    assert a.tolist() == [-2.0] * 4  # clamped
    assert b.tolist() == pytest.approx([-0.5] * 4)  # its norm of 6 clipped to 1


@pytest.mark.parametrize("precision", ["fp32", TorchFp16(init_scale=1024.0)])
def test_no_backward_after_clipping(precision: Any) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), precision=precision)
    optimizer.backward((w * 3).sum())
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match="have been clipped, and no more can be added"):
        optimizer.backward((w * 3).sum())
    optimizer.step()
    assert w.tolist() == pytest.approx([-0.5] * 4)
    optimizer.zero_grad()
    optimizer.backward((w * 3).sum())


@pytest.mark.parametrize("first", [True, False])
def test_a_micro_batch_with_nothing_in_it(first: bool) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), accumulation_steps=2)
    for empty in (first, not first):
        optimizer.backward(None if empty else (w * 3).sum())
    optimizer.step()
    assert w.tolist() == [-3.0] * 4, "the mean over those that have something in them"


def one_rank_runs_out() -> list[float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = parameter("w")
        optimizer = ParallelOptimizer(sgd([w]), registry, accumulation_steps=2)
        optimizer.backward((w * 3).sum())
        optimizer.backward((w * 6).sum() if registry.rank("data") == 0 else None)
        optimizer.step()
        return w.tolist()


def test_a_rank_that_runs_out_of_data(world: World) -> None:
    assert world.run(2, one_rank_runs_out) == [[-4.0] * 4] * 2  # (3 + 6 + 3) / 3


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise MemoryError("out of memory")


@pytest.mark.parametrize("steps", [None, 2])
def test_a_window_whose_backward_failed_is_given_up(steps: int | None) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), accumulation_steps=steps)
    optimizer.backward((w * 3).sum())
    with pytest.raises(MemoryError):
        optimizer.backward(Fails.apply(w * 3).sum())
    for call in (optimizer.step, lambda: optimizer.backward(w.sum())):
        with pytest.raises(RuntimeError, match=r"a backward of this window raised.*call zero_grad\(\)"):
            call()
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward((w * 3).sum() / (1 if steps else 2))
    optimizer.step()
    assert w.tolist() == [-3.0] * 4


@pytest.mark.parametrize("weight", [torch.tensor(torch.nan), torch.tensor(-1.0)])
def test_a_weight_that_is_none_skips(weight: Tensor) -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone())
    optimizer.backward(w.sum(), weight=weight)
    stats = optimizer.step()
    assert stats is not None
    assert stats.found_inf == 1
    assert w.tolist() == [0.0] * 4
    with pytest.raises(ValueError, match="weight=inf: give a finite number"):
        optimizer.backward(w.sum(), weight=float("inf"))


def test_a_schedule_stays_where_a_step_raised() -> None:
    w = parameter("w")
    optimizer = ParallelOptimizer(sgd([w]), alone(), on_nonfinite="raise")
    schedule = PolynomialLR(optimizer, total_steps=10)
    for factor in (1.0, float("inf"), float("inf")):
        optimizer.zero_grad()
        optimizer.backward((w * factor).sum())
        if factor == 1.0:
            optimizer.step()
        else:
            with pytest.raises(FloatingPointError):
                optimizer.step()
        schedule.step()
    assert schedule.last_epoch == 1


# Frozen parameters ----------------------------------------------------------------------------------------------------


def thaw(options: dict[str, Any]) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w, b = parameter("w"), parameter("b", trained=False)
        optimizer = ParallelOptimizer(sgd([w, b]), registry, **arguments(**options))
        b.requires_grad_(True)
        optimizer.backward((w + b).sum())
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("options", EVERYWHERE, ids=str)
def test_a_parameter_that_was_frozen(world: World, options: dict[str, Any]) -> None:
    for text in world.run(2, thaw, options):
        assert "b was frozen when the optimizer was made" in text
        assert "add_param_group" in text


def freeze(options: dict[str, Any], precision: str) -> tuple[bool, bool]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w, b = parameter("w", value=1.0), parameter("b", value=1.0)
        if precision == "bf16":
            w.data, b.data = w.data.bfloat16(), b.data.bfloat16()
        adamw = torch.optim.AdamW([w, b], lr=0.1, weight_decay=0.1)
        optimizer = ParallelOptimizer(adamw, registry, **arguments(precision=precision, **options))
        for step in range(4):
            before = w.detach().clone(), b.detach().clone()
            optimizer.zero_grad()
            optimizer.backward((w + b).float().sum())
            optimizer.step()
            if step == 0:
                b.requires_grad_(False)
        return torch.equal(w, before[0]), torch.equal(b, before[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", EVERYWHERE, ids=str)
def test_a_parameter_that_is_frozen_later_stays(world: World, options: dict[str, Any], precision: str) -> None:
    assert world.run(2, freeze, options, precision) == [(False, True)] * 2


def frozen_on_one() -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        params = [parameter("w"), parameter("b", trained=registry.rank("data") == 0), parameter("c", 6)]
        try:
            ParallelOptimizer(sgd(params), registry)
        except ValueError as error:
            return str(error)
        return "no error"


def test_a_parameter_that_is_frozen_on_one_rank(world: World) -> None:
    for text in world.run(2, frozen_on_one):
        assert "first in b" in text
        assert "param group 0, frozen]" in text


# Uneven ranks ---------------------------------------------------------------------------------------------------------


def stages_with_different_groups(axes: dict[str, int], options: dict[str, Any]) -> tuple[float, float | None, float]:
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        a = parameter("a", 16)
        groups: list[dict[str, Any]] = [{"params": [a]}]
        loss, b = (a * 3).sum(), None  # a norm of 12 on each stage
        if registry.rank("pipe") == 0:
            b = parameter("b", 16)
            groups.append({"params": [b], "max_norm": 1.0})
            loss = loss + (b * 100).sum()
        optimizer = ParallelOptimizer(sgd(groups), registry, **arguments(max_norm=2.0, **options))
        optimizer.backward(loss)
        stats = optimizer.step()
        assert stats is not None
        if b is not None:
            optimizer.param_groups[1]["max_norm"] = 3.0
            with pytest.raises(ValueError, match="other pipeline stages have fewer groups"):
                optimizer._clipping.thresholds.now(optimizer.param_groups)
        return float(a[0]), None if b is None else float(b[0]), float(stats.clip_coef)


@pytest.mark.parametrize(
    ("axes", "options"), [({"pipe": 2}, {}), ({"pipe": 2}, {"reduction": "per_group"}), ({"data": 2, "pipe": 2}, ZERO1)]
)
def test_stages_clip_by_the_same_norms(world: World, axes: dict[str, int], options: dict[str, Any]) -> None:
    common = 2.0 / (2 * 12**2) ** 0.5
    runs = world.run(Topology(roles=None, **axes).world_size, stages_with_different_groups, axes, options)
    assert len({coef for _, _, coef in runs}) == 1, "the same bits"
    for rank, (a, b, coef) in enumerate(runs):
        assert (a, coef) == pytest.approx((-3 * common, common))
        assert b == (pytest.approx(-1.0 / 4) if rank % 2 == 0 else None)


def different_thresholds() -> str:
    with ProcessGroupRegistry(Topology(pipe=2)) as registry:
        group = {"params": [parameter("a")], "max_norm": 1.0 + registry.rank("pipe")}
        try:
            ParallelOptimizer(sgd([group]), registry)
        except ValueError as error:
            return str(error)
        return "no error"


def test_thresholds_that_differ(world: World) -> None:
    for text in world.run(2, different_thresholds):
        assert text.startswith("max_norm of param group 0 is ")


def float16_sum(options: dict[str, Any]) -> tuple[float, float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        w = nn.Parameter(torch.zeros(16, dtype=torch.float16))
        annotate(w, P(), "w")
        optimizer = ParallelOptimizer(sgd([w], lr=2**-14), registry, **arguments(precision=ApexFp16("O3"), **options))
        optimizer.backward((w.float() * 40000.0).sum())
        stats = optimizer.step()
        assert stats is not None
        return float(w[0]), float(stats.total_norm)


@pytest.mark.parametrize("options", EVERYWHERE[:3], ids=str)
def test_averages_of_float16_do_not_overflow(world: World, options: dict[str, Any]) -> None:
    assert world.run(2, float16_sum, options) == [(-40000.0 / 2**14, 160000.0)] * 2


def late_sparse(precision: str, options: dict[str, Any], clip: bool) -> tuple[int, int]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        embedding = nn.Embedding(6, 4).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        annotate(embedding.weight, P(), "e")
        optimizer = ParallelOptimizer(
            sgd(embedding.parameters()), registry, **arguments(precision=precision, **options)
        )
        errors = 0
        for step in range(3):
            optimizer.zero_grad()
            embedding.sparse = step == 1 and registry.rank("data") == 1
            optimizer.backward(embedding(torch.tensor([1, 2])).float().sum())
            calls: list[Callable[[], object]] = [lambda: optimizer.clip_grad_by_norm(1.0)] if clip else []
            for call in (*calls, optimizer.step):
                try:
                    call()
                except TypeError:
                    errors += 1
        return errors, optimizer.skipped_steps


@pytest.mark.parametrize(
    ("precision", "options", "clip"),
    [("fp32", {}, True), ("bf16", {"offload": 1.0}, False), ("bf16", {"offload": 1.0}, True)],
)
def test_a_sparse_gradient_that_turns_up_late(
    world: World, precision: str, options: dict[str, Any], clip: bool
) -> None:
    assert world.run(2, late_sparse, precision, options, clip) == [(0, 1), (1, 1)]


def uneven_offload() -> list[list[float]]:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        shared = parameter("shared", 4, value=1.0)
        own = parameter("own", 100, P(owned={"tensor": 0}), value=1.0)
        params = [param.data.bfloat16() for param in (shared, own)]
        params = [nn.Parameter(param) for param in params]
        annotate(params[0], P(), "shared")
        annotate(params[1], P(owned={"tensor": 0}), "own")
        mine = params if registry.rank("tensor") == 0 else params[:1]
        optimizer = ParallelOptimizer(
            sgd(mine, lr=0.001), registry, **arguments(precision="bf16", offload=0.5, check_replicas=True)
        )
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(sum((param.float().sum() for param in mine), torch.zeros(())))
            optimizer.step()
        return [param.tolist() for param in mine[:1]]


def test_copies_of_which_only_some_are_offloaded(world: World) -> None:
    first, second = world.run(2, uneven_offload)
    assert first == second


class Exchange(torch.autograd.Function):
    """As experts do: over the axis, in backward as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def experts(named: bool, options: dict[str, Any]) -> list[float]:
    roles: Any = {} if named else {"expert": "data"}
    axis = "data" if named else "expert"
    with ProcessGroupRegistry(Topology(roles=roles, **{axis: 2})) as registry, small_buckets(64):
        a, b, c = (parameter(name, 40, value=1.0) for name in "abc")
        params = [a, b, c, *([parameter("experts", 4, P("data"))] if named else [])]
        options = {**options, "shard_states": axis} if options else {}
        optimizer = ParallelOptimizer(sgd(params), registry, **arguments(**options))
        x = Exchange.apply(a * 1.0, registry.group(axis)) * b
        x = x + c if registry.rank(axis) == 0 else x
        optimizer.backward((x * torch.arange(40.0)).sum())
        optimizer.step()
        return [float(value) for param in (a, b, c) for value in param[:4]]


@pytest.mark.parametrize("named", [False, True])
def test_sharded_gradients_wait_for_a_model_that_uses_the_axis(world: World, named: bool) -> None:
    plain = world.run(2, experts, named, {})
    assert world.run(2, experts, named, ZERO2) == plain
