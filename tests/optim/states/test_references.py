"""Simple reference implementations of ZeRO, offload and window weights, compared with the optimizer on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from arguments import link_of
from loops import using
from meshstep.amp import Bf16, Mode, NaiveFp16, Precision
from meshstep.optim import Offloaded, ParallelOptimizer, Sharded
from meshstep.optim.clip.clipper import inverse_weight
from meshstep.optim.gradients.buckets import FlatBucket
from meshstep.optim.states.sharded import Shards, ZeroBucket
from meshstep.optim.step.window import place_of, window_fields
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from meshstep.parallel.layout.annotation import annotation_of
from optimizers import OPTIMIZERS
from planted import LAYOUTS, Planted, run_step
from torch import Tensor, nn
from world import World
from zero_models import small_buckets

# ZeRO slices ----------------------------------------------------------------------------------------------------------


def reference_slice(
    gradients: Sequence[Sequence[Tensor]], layout: FlatBucket, rank: int, average: bool
) -> list[Tensor]:
    """Return the reference value of the gradients of a bucket's shards in float64, from full gradients of all ranks."""
    totals = [torch.stack(list(of_all)).double().sum(0).flatten() for of_all in zip(*gradients, strict=True)]
    parts = [totals[s.param_index][s.start : s.start + s.numel] for s in layout.segments(rank)]
    return [part / len(gradients) if average else part for part in parts]


def reference_sharded_step(
    params: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    layout: FlatBucket,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Step ``params`` in place as a reference for a sharded step: each optimizer steps its rank's slice of ``params``.

    ``gradients`` has, for each rank of the axis, the gradient per parameter. Each optimizer has copies of its rank's
    segments of ``params``. Gradients are averaged over the ranks.
    """
    for rank, optimizer in enumerate(optimizers):
        copies = [copy for group in optimizer.param_groups for copy in group["params"]]
        parts = reference_slice(gradients, layout, rank, average=True)
        shards = list(zip(copies, parts, layout.segments(rank), strict=True))
        for copy, gradient, _ in shards:
            copy.grad = gradient.to(copy.dtype)
        optimizer.step()
        for copy, _, s in shards:
            params[s.param_index].data.view(-1)[s.start : s.start + s.numel] = copy.detach()


def slices_off(layout_name: str, how: Sharded, mode: Mode | Precision, micros: int, wrong: bool) -> list[float]:
    """Return the distance of each bucket's slices from the reference; ``wrong`` gives the reference a wrong divisor."""
    layout = LAYOUTS[layout_name]
    with ProcessGroupRegistry(layout.topology) as registry, small_buckets(64):
        rank, topology = registry.global_rank, layout.topology
        model = Planted(layout, rank)
        if isinstance(mode, Precision):
            mode.prepare(model, registry)
        groups: Any = model.groups()
        optimizer = ParallelOptimizer(torch.optim.SGD(groups, lr=0.1), registry, precision=mode, states=how)
        run_step(model, optimizer, 0, micros)
        for transform in optimizer._chain.pulling_grads:
            transform.pull_grads(optimizer._window, True)
        scale = 1.0 if optimizer.loss_scale is None else float(optimizer.loss_scale.scale)
        found = []
        for bucket in link_of(optimizer, Shards).buckets:
            names = [annotation.name for p in bucket.params if (annotation := annotation_of(p)) and annotation.name]
            ranks = topology.peers(rank, how.axis) if bucket.summed else (rank,)
            whole = [
                [
                    sum((layout.local(layout.share(n, r, 0, k), n, r) for k in range(micros)), torch.zeros(()))
                    for n in names
                ]
                for r in ranks
            ]
            average = (how.axis in topology.data_axes and bucket.summed) is not wrong
            expected = reference_slice(whole, bucket.layout, registry.rank(how.axis), average)
            if not bucket.summed and wrong:
                expected = [2 * part for part in expected]
            for shard, part in zip(bucket.shards, expected, strict=True):
                gradient = shard.gradient
                assert gradient is not None
                assert gradient.dtype == torch.float32
                found.append(float((gradient.double() / scale - part).abs().max() / part.abs().max()))
        return found


SLICED = [
    ("data", Sharded("data")),
    ("data", Sharded("data", gradients=True)),
    ("data x tensor", Sharded("data")),
    ("data x tensor", Sharded("data", gradients=True)),
    ("grid", Sharded("row")),
    ("grid", Sharded("col", gradients=True)),
]


@pytest.mark.parametrize(("mode", "micros"), [("fp32", 1), ("fp32", 3), (NaiveFp16(init_scale=64.0), 2)])
@pytest.mark.parametrize(("layout", "how"), SLICED)
def test_gradient_slices_with_zero1_and_zero2_match_reference(
    world: World, layout: str, how: Sharded, mode: Mode | Precision, micros: int
) -> None:
    by_rank = world.run(LAYOUTS[layout].topology.world_size, slices_off, layout, how, mode, micros, False)
    assert sum(map(len, by_rank)) >= 2, "some ranks may only have slices of padding, but not all"
    assert max(off for found in by_rank for off in found) < 1e-6


@pytest.mark.parametrize(("layout", "how"), SLICED[:5])
def test_gradient_slices_differ_from_reference_with_wrong_divisor(world: World, layout: str, how: Sharded) -> None:
    for found in world.run(LAYOUTS[layout].topology.world_size, slices_off, layout, how, "fp32", 1, True):
        assert min(found) > 0.4


def stepped_off(how: Sharded, kind: str, wrong: float) -> float:
    """Return the distance of float64 parameters from the reference, whose gradients are multiplied by ``wrong``."""
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(128):
        draw = torch.Generator().manual_seed(0)
        shapes = [(5, 3), (7,), (2, 9)]
        model = nn.ParameterList([torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes])
        declare(model, {"*": P()})
        whole = {param: param.detach().clone() for param in model}
        optimizer = ParallelOptimizer(OPTIMIZERS[kind](model.parameters(), False), registry, states=how)
        buckets, ranks = link_of(optimizer, Shards).buckets, range(registry.size("data"))
        assert len(buckets) > 1

        def alone(bucket: ZeroBucket, rank: int) -> torch.optim.Optimizer:
            segments = bucket.layout.segments(rank)  # empty if a slice contains only padding
            parts = [whole[bucket.params[s.param_index]].view(-1)[s.start : s.start + s.numel] for s in segments]
            return OPTIMIZERS[kind]([{"params": [part.clone() for part in parts]}], False)

        by_rank = {bucket: [alone(bucket, rank) for rank in ranks] for bucket in buckets}
        for _ in range(3):
            given = {p: torch.randn(len(ranks), *p.shape, generator=draw, dtype=torch.float64) for p in model}
            optimizer.zero_grad()
            optimizer.backward(torch.stack([(p * g[registry.global_rank]).sum() for p, g in given.items()]).sum())
            optimizer.step()
            for bucket in buckets:
                gradients = [[given[p][rank] * wrong for p in bucket.params] for rank in ranks]
                reference_sharded_step([whole[p] for p in bucket.params], gradients, bucket.layout, by_rank[bucket])
        return max(float((param.detach() - whole[param]).abs().max()) for param in model)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("how", [Sharded("data"), Sharded("data", gradients=True)])
def test_step_with_zero1_and_zero2_matches_reference(world: World, how: Sharded, kind: str) -> None:
    assert max(world.run(2, stepped_off, how, kind, 1.0)) < 1e-14
    assert min(world.run(2, stepped_off, how, kind, 1.001)) > 1e-14, "gradients with a wrong scale must be detected"


# CPU offload ----------------------------------------------------------------------------------------------------------


def reference_offloaded_step(
    params: Sequence[Tensor], gradients: Sequence[Tensor | None], optimizer: torch.optim.Optimizer
) -> None:
    """Step ``params`` in place as a reference for `Offloaded`: copy gradients to the CPU, step, copy weights back."""
    copies = [param for group in optimizer.param_groups for param in group["params"]]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = None if gradient is None else gradient.to("cpu", copy.dtype)
    optimizer.step()
    for param, copy in zip(params, copies, strict=True):
        param.data.copy_(copy)


def offloaded_off(layout_name: str, fraction: float, mode: Mode | Precision, kind: str, wrong: float) -> float:
    """Return the largest weight difference after three steps; the reference's gradients are multiplied by ``wrong``."""
    layout = LAYOUTS[layout_name]
    kinds: dict[str, Any] = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5, fused=True),
    }
    with ProcessGroupRegistry(layout.topology) as registry, using("torch"):  # the reference uses torch kernels
        model, plain = (Planted(layout, registry.global_rank) for _ in range(2))
        if isinstance(mode, Precision):
            mode.prepare(model, registry)
            mode.prepare(plain, registry)
        groups: Any = model.groups()
        optimizer = ParallelOptimizer(kinds[kind](groups), registry, precision=mode, states=Offloaded(fraction))
        params = [param for group in plain.groups() for param in group["params"]]
        reference = kinds[kind]([param.detach().float().clone().requires_grad_() for param in params])
        for step in range(3):
            run_step(model, optimizer, step)
            optimizer.step()
            gradients = torch.autograd.grad(plain(step), params)
            reference_offloaded_step(params, [gradient.float() * wrong for gradient in gradients], reference)
        named = dict(model.named_parameters())
        return max(
            float((named[name].detach().double() - param.detach().double()).abs().max())
            for name, param in plain.named_parameters()
        )


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("mode", ["fp32", Bf16()])
def test_offloaded_step_is_bitwise_identical_to_reference(
    world: World, fraction: float, mode: Mode | Precision, kind: str
) -> None:
    assert world.run(2, offloaded_off, "tensor", fraction, mode, kind, 1.0) == [0.0, 0.0]


def test_offloaded_step_differs_from_reference_with_wrong_gradient_scale(world: World) -> None:
    assert min(world.run(2, offloaded_off, "tensor", 1.0, "fp32", "sgd", 1.001)) > 0


# Weights of accumulation windows --------------------------------------------------------------------------------------


def reference_inverse_weight(weights: Sequence[Sequence[float]]) -> float:
    """Return the number of data ranks divided by the sum of all weights; 1 if the sum is 0.

    ``weights[d][k]`` is the weight of micro-batch k on data rank d.
    """
    total = sum(sum(of_rank) for of_rank in weights)
    return len(weights) / total if total else 1.0


def inverse_on(axes: tuple[tuple[str, int], ...], weights: list[list[float]], as_tensor: bool) -> float:
    with ProcessGroupRegistry(Topology(roles=None, **dict(axes))) as registry:
        topology = registry.topology
        last = all(registry.coordinate[axis] == topology.size(axis) - 1 for axis in topology.pipe_axes)
        own = sum(weights[registry.rank(*topology.data_axes)]) if last else 0.0
        weight: float | Tensor = torch.tensor(own, dtype=torch.float64) if as_tensor else own
        slots = window_fields(weight, registry, torch.device("cpu")).values
        dist.all_reduce(slots)
        return float(inverse_weight(slots, place_of(registry).data_ranks))


MESHES = [(("data", 2),), (("data", 2), ("tensor", 2)), (("pipe", 2), ("data", 2)), (("row", 2), ("data", 2))]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("weights", [[[3.0, 5.0], [7.0, 1.0]], [[0.5], [0.0]], [[0.0, 0.0], [0.0, 0.0]]])
@pytest.mark.parametrize("axes", MESHES)
def test_inverse_weight_of_accumulation_window_matches_reference(
    world: World, axes: Any, weights: list[list[float]], as_tensor: bool
) -> None:
    size = Topology(roles=None, **dict(axes)).world_size
    found = world.run(size, inverse_on, axes, weights, as_tensor)
    assert found == [pytest.approx(reference_inverse_weight(weights), rel=1e-15)] * size


@pytest.mark.parametrize("axes", MESHES)
def test_inverse_weight_differs_from_reference_that_omits_a_micro_batch(world: World, axes: Any) -> None:
    size = Topology(roles=None, **dict(axes)).world_size
    found = world.run(size, inverse_on, axes, [[3.0, 5.0], [7.0, 1.0]], False)
    assert found != [pytest.approx(reference_inverse_weight([[3.0, 5.0], [7.0]]), rel=1e-3)] * size
