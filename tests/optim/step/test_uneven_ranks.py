"""Ranks with different parameters, gradients or thresholds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arguments import arguments
from meshstep.amp import ApexFp16
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from small_models import parameter
from torch import Tensor, nn
from world import World
from zero_models import ZERO1, ZERO2, small_buckets

EVERYWHERE: list[dict[str, Any]] = [{}, ZERO1, ZERO2, {"offload": 1.0}]


def sgd(params: Any, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def stages_with_different_groups(axes: dict[str, int], options: dict[str, Any]) -> tuple[float, float | None, float]:
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        a = parameter("a", 16)
        groups: list[dict[str, Any]] = [{"params": [a]}]
        loss, b = (a * 3).sum(), None  # the gradient of `a` has norm 12 on each stage
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
            thresholds = optimizer._clipper.thresholds
            assert thresholds is not None
            with pytest.raises(ValueError, match="Ranks without some of these groups"):
                thresholds.now(optimizer.param_groups)
        return float(a[0]), None if b is None else float(b[0]), float(stats.clip_coef)


@pytest.mark.parametrize(
    ("axes", "options"), [({"pipe": 2}, {}), ({"pipe": 2}, {"reduction": "per_group"}), ({"data": 2, "pipe": 2}, ZERO1)]
)
def test_pipeline_stages_with_different_param_groups_clip_by_same_norms(
    world: World, axes: dict[str, int], options: dict[str, Any]
) -> None:
    common = 2.0 / (2 * 12**2) ** 0.5
    runs = world.run(Topology(roles=None, **axes).world_size, stages_with_different_groups, axes, options)
    assert len({coef for _, _, coef in runs}) == 1, "clip coefficients differ between ranks"
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


def test_group_thresholds_that_differ_between_stages_raise(world: World) -> None:
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
def test_averaging_float16_gradients_does_not_overflow(world: World, options: dict[str, Any]) -> None:
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
def test_sparse_gradient_in_later_step_raises_on_its_rank_and_skips_one_step(
    world: World, precision: str, options: dict[str, Any], clip: bool
) -> None:
    assert world.run(2, late_sparse, precision, options, clip) == [(0, 1), (1, 1)]


def late_sparse_in_a_window(options: dict[str, Any]) -> tuple[int, int, list[float]]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        embedding = nn.Embedding(6, 4)
        nn.init.ones_(embedding.weight)
        annotate(embedding.weight, P(), "e")
        optimizer = ParallelOptimizer(
            sgd(embedding.parameters()), registry, **arguments(accumulation_steps=2, **options)
        )
        errors = 0
        for step in range(3):
            embedding.sparse = step == 1 and registry.rank("data") == 1
            for micro in range(2):
                optimizer.backward(embedding(torch.tensor([1, 2])).sum())
                if micro == 0:
                    assert optimizer.clip_grad_by_norm(1.0) is None
                try:
                    optimizer.step()
                except TypeError:
                    errors += 1
                optimizer.zero_grad()
        return errors, optimizer.skipped_steps, embedding.weight.flatten().tolist()


@pytest.mark.parametrize("options", [{}, {"offload": 1.0}], ids=str)
def test_sparse_gradient_in_window_with_explicit_clip_skips_only_its_step(
    world: World, options: dict[str, Any]
) -> None:
    (errors, skipped, weights), (of_sparse, also_skipped, same_weights) = world.run(2, late_sparse_in_a_window, options)
    assert (errors, of_sparse) == (0, 1)
    assert (skipped, also_skipped) == (1, 1)
    assert weights == same_weights


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


def test_replicas_stay_equal_if_ranks_with_different_parameters_offload(world: World) -> None:
    first, second = world.run(2, uneven_offload)
    assert first == second


class Exchange(torch.autograd.Function):
    """All-reduce in forward and backward, like the token exchange of experts."""

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


def experts(axis: str, options: dict[str, Any]) -> list[float]:
    roles: Any = {"expert": "data"} if axis == "expert" else {}
    with ProcessGroupRegistry(Topology(roles=roles, **{axis: 2})) as registry, small_buckets(64):
        a, b, c = (parameter(name, 40, value=1.0) for name in "abc")
        params = [a, b, c, *([parameter("experts", 4, P("data"))] if axis == "data" else [])]
        options = {**options, "shard_states": axis} if "shard_states" in options else options
        optimizer = ParallelOptimizer(sgd(params), registry, **arguments(**options))
        x = Exchange.apply(a * 1.0, registry.group(axis)) * b
        x = x + c if registry.rank(axis) == 0 else x
        optimizer.backward((x * torch.arange(40.0)).sum())
        optimizer.step()
        return [float(value) for param in (a, b, c) for value in param[:4]]


@pytest.mark.parametrize("axis", ["expert", "data", "cp"])
def test_zero2_and_overlap_match_plain_run_if_model_communicates_over_data_axis(world: World, axis: str) -> None:
    """The axis "expert" is a data axis by its role, "data" is named by a spec, and "cp" is a data axis by its name."""
    plain = world.run(2, experts, axis, {})
    assert world.run(2, experts, axis, ZERO2) == plain
    assert world.run(2, experts, axis, {"overlap": True, "bucket_bytes": 64}) == plain


def mean_of_gradients(name: str) -> float:
    """Return a replicated weight after a step with gradient 1 on the first rank and 2 on the second."""
    with ProcessGroupRegistry(Topology(roles=None, **{name: 2})) as registry:
        w = parameter("w", 4)
        # Along a model axis replicas must have equal gradients, which the first step would check.
        optimizer = ParallelOptimizer(sgd([w]), registry, check_replicas=False)
        optimizer.backward((w * (1.0 + registry.rank(name))).sum())
        optimizer.step()
        return float(w[0])


def test_gradients_are_averaged_over_axes_with_usual_data_parallel_names(world: World) -> None:
    replicas = ["data", "replica", "dp", "ddp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "edp", "efsdp"]
    names = [*replicas, "cp", "context"]
    results = world.run_each(mean_of_gradients, [(2, (name,)) for name in names])
    assert dict(zip(names, results, strict=True)) == {name: [-1.5, -1.5] for name in names}
    assert world.run(2, mean_of_gradients, "tp") == [-1.0, -2.0]


def experts_of_no_told_role(roles: Any, spec: P) -> list[str]:
    with ProcessGroupRegistry(Topology(data=2, expert=2, roles=roles)) as registry:
        params = [parameter("experts", 4, P("expert")), parameter("router", 4, spec)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ParallelOptimizer(sgd(params), registry)
        return [str(warning.message) for warning in caught]


def test_expert_axis_without_declared_role_warns(world: World) -> None:
    texts = world.run(4, experts_of_no_told_role, {}, P())
    assert [len(text) for text in texts] == [1, 0, 0, 0]
    assert texts[0][0].startswith("axis 'expert' shards experts and replicates router, but has no declared role")
    assert "gradients of replicas are not averaged over it" in texts[0][0]
    assert "roles={'expert': 'data'}" in texts[0][0]
    for roles, spec in (({"expert": "data"}, P()), ({"expert": "model"}, P()), ({}, P(partial="expert"))):
        assert world.run(4, experts_of_no_told_role, roles, spec) == [[]] * 4


def step_with_bad_threshold_on_one_rank(value: object) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        param = parameter("a", 4)
        optimizer = ParallelOptimizer(sgd([{"params": [param], "max_norm": 1.0}]), registry)
        optimizer.backward((param * 3).sum())
        optimizer.step()
        optimizer.zero_grad()
        if registry.global_rank == 1:
            optimizer.param_groups[0]["max_norm"] = value
        optimizer.backward((param * 3).sum())
        try:
            optimizer.step()
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return "no error"


@pytest.mark.parametrize(("value", "error"), [("text", "TypeError"), (-1.0, "ValueError")])
def test_bad_clip_threshold_on_one_rank_raises_there_and_hangs_no_rank(world: World, value: object, error: str) -> None:
    assert world.run(2, step_with_bad_threshold_on_one_rank, value) == ["no error", error]
