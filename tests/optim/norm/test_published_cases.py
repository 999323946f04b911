"""Wrong norms, most of them reported for other libraries. Each case reproduces the wrong norm on real ranks, and compares
the norm of this library with the norm of the dense model.

A gradient has few elements, chosen so that the norms equal those of the reports. If a report gives only a
relative error, or uses more than four ranks, the elements give the same figures on two or four ranks. If a report has no
figures, the elements are chosen freely, and the wrong norm follows from the wrong rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshstep.amp import TorchFp16
from meshstep.optim import ParallelOptimizer, global_norm
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, shard
from torch import Tensor, nn
from world import World

COPIED = P()


@dataclass(frozen=True)
class Gradient:
    """A parameter's full gradient and layout. ``terms`` are the contributions per coordinate of its tied or partial
    axis; ``stage`` is the pipeline stage that holds the parameter."""

    full: tuple[float, ...]
    spec: P = COPIED
    terms: tuple[tuple[float, ...], ...] = ()
    stage: int | None = None

    def complete(self, registry: ProcessGroupRegistry) -> Tensor:
        return shard(torch.tensor(self.full, dtype=torch.float64), self.spec, registry)

    def local(self, registry: ProcessGroupRegistry) -> Tensor:
        """Return this rank's gradient as after backward, if the loss is a mean over the data axes."""
        topology = registry.topology
        if self.terms:
            (axis,) = (*self.spec.partial, *dict(self.spec.tied))
            return torch.tensor(self.terms[registry.rank(axis)], dtype=torch.float64)
        # A parameter sharded over a data axis (experts) gets the sum of the gradients of all data ranks' samples, not the
        # mean, so multiply by the axis size.
        samples = [topology.size(axis) for axis in self.spec.sharded_axes if axis in topology.data_axes]
        return self.complete(registry) * prod(samples)

    def is_held(self, registry: ProcessGroupRegistry) -> bool:
        return self.spec.holds(registry.coordinate, registry.topology) and self.stage in (
            None,
            registry.coordinate.get("pipe"),
        )


Rule = Callable[[Mapping[str, Gradient], ProcessGroupRegistry], float]


def square(gradient: Tensor) -> float:
    return float(gradient.square().sum())


def summed(value: float, registry: ProcessGroupRegistry, *axes: str) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=registry.group(*axes))
    return float(total)


# The wrong rules. Each returns the norm that this rank would use. -----------------------------------------------------


def by_flag(*flagged: str, axis: str = "tensor") -> Rule:
    """Count everything on the first rank of the axis, and only parameters in ``flagged`` on the other ranks. Sum over the
    axis. ``axis`` may name several axes, separated by spaces."""

    def rule(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
        first = all(registry.rank(a) == 0 for a in axis.split())
        mine = (g.complete(registry) for name, g in held.items() if first or name in flagged)
        return sqrt(summed(sum(map(square, mine)), registry, *axis.split()))

    return rule


def over(*axes: str) -> Rule:
    """Sum the squares of everything that each rank holds over the ranks of ``axes``."""

    def rule(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
        return sqrt(summed(sum(square(g.complete(registry)) for g in held.values()), registry, *axes))

    return rule


def alone(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    """Use the local norm of each rank, with partial gradients not reduced."""
    return sqrt(sum(square(g.local(registry)) for g in held.values()))


def experts_alone(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    """Sum the squares of the dense parameters over the expert axis, but use only the local square of the experts."""
    dense = summed(square(held["dense"].complete(registry)), registry, "expert")
    return sqrt(dense + square(held["experts"].complete(registry)))


def mean_of_norms(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    """Average the local norms of the ranks, as if all ranks held the same parameters."""
    return summed(alone_complete(held, registry), registry, "expert") / registry.size("expert")


def alone_complete(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    return sqrt(sum(square(g.complete(registry)) for g in held.values()))


def without_experts(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    """Omit the expert parameters, which are set apart for another reduction and then forgotten."""
    return sqrt(square(held["dense"].complete(registry)))


def divided_as_dense_over_fewer(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    """Divide expert gradients by the size of the experts' data group, not by the number of ranks whose samples
    contributed to these gradients."""
    experts = held["experts"].local(registry)
    dist.all_reduce(experts, group=registry.group("edp"))
    experts /= registry.size("edp")
    return sqrt(square(held["dense"].complete(registry)) + summed(square(experts), registry, "expert"))


def of_world_where_none(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    """Pass a missing model-parallel group as None, which torch takes for the world group."""
    total = torch.tensor(alone_complete(held, registry) ** 2)
    dist.all_reduce(total, group=None)
    return sqrt(float(total))


def copies_combined(average: bool) -> Rule:
    """Average or sum every replicated gradient over the tensor ranks, whether it is partial or complete."""

    def rule(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
        total = 0.0
        for gradient in held.values():
            combined = gradient.local(registry)
            dist.all_reduce(combined, group=registry.group("tensor"))
            total += square(combined / registry.size("tensor") if average else combined)
        return sqrt(total)

    return rule


def over_replicas(held: Mapping[str, Gradient], registry: ProcessGroupRegistry) -> float:
    """Divide each power by the number of ranks that could hold a replica, and sum over all ranks."""
    mine = sum(square(g.complete(registry)) / registry.topology.world_size for g in held.values())
    return sqrt(summed(mine, registry, *registry.topology.axes))


@dataclass(frozen=True)
class Published:
    """A report: mesh, gradients, the true norm, the wrong rule, and the wrong norm per rank (or one number for all
    ranks)."""

    topology: Topology
    gradients: dict[str, Gradient]
    true: float
    rule: Rule
    wrong: float | tuple[float, ...]
    digits: float = 1e-4  # the relative rounding of the figures in the report

    def by_rank(self) -> tuple[float, ...]:
        return self.wrong if isinstance(self.wrong, tuple) else (self.wrong,) * self.topology.world_size


# One gradient is complete on each rank; the other is partial, because each rank computes some attention heads.
COPIES = {
    "norm": Gradient((8.0,)),
    "norm of heads": Gradient((6.0,), P(partial="tensor"), terms=((1.0,), (5.0,))),
}
EXPERTS: dict[str, Any] = {"expert": "data"}
TENSOR, FOUR = Topology(tensor=2), Topology(tensor=4)

# A column-parallel layer, and the bias of a row-parallel layer; the total norm is 100.
LAYERS = {
    "column": Gradient((sqrt(2731.0), sqrt(3060.0)), P("tensor")),
    "column bias": Gradient((sqrt(1164.0), sqrt(1164.0)), P("tensor")),
    "row bias": Gradient((sqrt(1881.0),)),
}
GRID = {
    "weight": Gradient(tuple([sqrt((10000 - 2056.04) / 4)] * 4), P(("row", "col"))),
    "bias": Gradient((sqrt(1310.48), sqrt(745.56)), P("col")),
}

CASES: dict[str, Published] = {
    # Experts -----------------------------------------------------------------------------------------------------------
    "Megatron-LM 5916: ranks other than TP rank 0 omit experts": Published(
        TENSOR,
        {"dense": Gradient((1.0,)), "experts": Gradient((1.0, 1.0), P("tensor"))},
        sqrt(3),
        by_flag(),
        sqrt(2),
    ),
    "Megatron-LM 5916: with TP4, EP4, ETP1 in a training run": Published(
        FOUR,
        {
            "dense": Gradient((9.0,)),
            "experts": Gradient((sqrt(51.5606842041), 3.0, 2.0, sqrt(5.1256026858)), P("tensor")),
        },
        12.2754343246,
        by_flag(),
        11.5135000849,
        digits=1e-8,
    ),
    "Megatron-LM 7165: expert gradients divided by wrong group size": Published(
        Topology(edp=2, expert=2, roles=EXPERTS),
        {"dense": Gradient((3.0,)), "experts": Gradient((2.4, 3.2), P("expert"))},
        5.0,
        divided_as_dense_over_fewer,
        sqrt(9 + (2 * 4.0) ** 2),
    ),
    "Megatron-LM 6165: replicas in expert-tensor group counted twice": Published(
        Topology(etp=2, expert=2, roles=EXPERTS),
        {"weight": Gradient((3.0, 2.0, 4.0, 1.0), P(("expert", "etp"))), "bias": Gradient((1.0, 1.0), P("expert"))},
        sqrt(32),
        over("etp", "expert"),
        sqrt(34),
    ),
    "Automodel 3816: norm not summed over EP ranks": Published(
        Topology(expert=2, roles=EXPERTS),
        {"dense": Gradient((sqrt(8), sqrt(8)), P("expert")), "experts": Gradient((40.0, 0.4), P("expert"))},
        40.201493,
        experts_alone,
        (40.199502, 4.019950),
        digits=1e-6,
    ),
    "DeepSpeed 8475: mean of the norms of different experts": Published(
        Topology(expert=2, roles=EXPERTS),
        {"experts": Gradient((2.0, 4.0, 6.0, 8.0), P("expert"))},
        10.954452,
        mean_of_norms,
        7.236068,
        digits=1e-6,
    ),
    "DeepSpeed 8613: fp16 wrapper omits expert parameters": Published(
        Topology(expert=2, roles=EXPERTS),
        {"dense": Gradient((3.0,) * 4), "experts": Gradient((4.0,) * 4, P("expert"))},
        10.0,
        without_experts,
        6.0,
    ),
    # Data axes that shard and data axes that replicate ----------------------------------------------------------------
    "VeOmni 184: HSDP norm summed over replicas too": Published(
        Topology(dp_replicate=2, dp_shard=2),
        {"weight": Gradient((3.0, 4.0), P("dp_shard"))},
        5.0,
        over("dp_replicate", "dp_shard"),
        5.0 * sqrt(2),
    ),
    "hyper-parallel 279: replicated parameters counted by every rank": Published(
        Topology(dp_shard=4),
        {
            "weight": Gradient(tuple([sqrt((784 - 1520 / 3) / 4)] * 4), P("dp_shard")),
            "bias": Gradient((sqrt(1520 / 3),)),
        },
        28.0,
        over("dp_shard"),
        48.0,
    ),
    "Megatron-LM: missing group taken for world group, data replicas counted": Published(
        Topology(data=2), {"weight": Gradient((4.0,))}, 4.0, of_world_where_none, 5.657
    ),
    # Pipelines ---------------------------------------------------------------------------------------------------------
    "Megatron-LM 7227: tied embeddings counted on both stages": Published(
        Topology(pipe=2),
        {"embedding": Gradient((20.0, 20.0), P(tied={"pipe": (0, -1)}), terms=((5.0, 12.0), (15.0, 8.0)))},
        28.284,
        over("pipe"),
        40.0,
        digits=2e-5,
    ),
    "DeepSpeed: norm not summed over pipeline stages": Published(
        Topology(pipe=2),
        {
            "first": Gradient((6.0,), stage=0),
            "second": Gradient((8.0,), stage=1),
        },
        10.0,
        alone_complete,
        (6.0, 8.0),
    ),
    # One flag per parameter -------------------------------------------------------------------------------------------
    "DeepSpeed: flag of column-parallel bias missing, -6%": Published(
        TENSOR, LAYERS, 100.0, by_flag("column"), 94.0, digits=1e-6
    ),
    "DeepSpeed: no flags, only rank 0 counted, -24%": Published(TENSOR, LAYERS, 100.0, by_flag(), 76.0, digits=1e-6),
    "DeepSpeed: row-parallel bias flagged as sharded, +9%": Published(
        TENSOR, LAYERS, 100.0, by_flag(*LAYERS), 109.0, digits=1e-4
    ),
    "2 x 2 grid: bias sharded over one axis without flag, -3.8%": Published(
        Topology(row=2, col=2), GRID, 100.0, by_flag("weight", axis="row col"), 96.2, digits=1e-6
    ),
    "2 x 2 grid: bias sharded over one axis with flag, +9.8%": Published(
        Topology(row=2, col=2), GRID, 100.0, by_flag(*GRID, axis="row col"), 109.8, digits=1e-5
    ),
    "TransformerEngine-ROCm 715: replicated weights flagged as sharded, 1.52 times": Published(
        FOUR,
        {
            "split": Gradient(tuple([sqrt((2.472**2 - (3.763**2 - 2.472**2) / 3) / 4)] * 4), P("tensor")),
            "copied": Gradient((sqrt((3.763**2 - 2.472**2) / 3),)),
        },
        2.472,
        by_flag("split", "copied"),
        3.763,
    ),
    "NeMo-RL 3788: replicated norms of q and k summed over tensor ranks": Published(
        FOUR,
        {"split": Gradient((2.0, 2.0, 2.0, 2.0), P("tensor")), "norms": Gradient((3.0,))},
        5.0,
        over("tensor"),
        sqrt(16 + 4 * 9),
    ),
    "Megatron-LM 7530: sharded attention sinks without flag": Published(
        TENSOR,
        {"weight": Gradient((sqrt(72), sqrt(72)), P("tensor")), "sinks": Gradient((3.0, 4.0), P("tensor"))},
        13.0,
        by_flag("weight"),
        sqrt(144 + 9),
    ),
    # Replicated parameters with complete and with partial gradients ---------------------------------------------------
    "Automodel 3857: partial gradients averaged over tensor ranks": Published(
        TENSOR, COPIES, 10.0, copies_combined(average=True), sqrt(64 + 3**2)
    ),
    "Automodel 3857: complete gradients summed over tensor ranks": Published(
        TENSOR, COPIES, 10.0, copies_combined(average=False), sqrt(16**2 + 36)
    ),
    # Other layouts ----------------------------------------------------------------------------------------------------
    "ColossalAI 2.5-D: bias owned by row 0 divided by nonexistent replicas": Published(
        Topology(depth=2, row=2),
        {"bias": Gradient((sqrt(488.0),), P(owned={"row": 0})), "weight": Gradient((0.0, 0.0), P("row"))},
        sqrt(488),
        over_replicas,
        sqrt(244),
    ),
    "Megatron-LM 1446: layer norm gradient under sequence parallelism not summed": Published(
        FOUR,
        {"gain": Gradient((4.0,), P(partial="tensor"), terms=((3.0,), (-3.0,), (1.0,), (3.0,)))},
        4.0,
        alone,
        (3.0, 3.0, 1.0, 3.0),
    ),
}


def measured(name: str) -> tuple[float, float]:
    """Return the norm by the wrong rule and the norm by which the optimizer clipped, after checking the clipped
    step."""
    case = CASES[name]
    with ProcessGroupRegistry(case.topology) as registry:
        held = {name: gradient for name, gradient in case.gradients.items() if gradient.is_held(registry)}
        wrong = case.rule(held, registry)
        params: dict[str, nn.Parameter] = {}
        for name, gradient in held.items():
            grad = gradient.local(registry)
            params[name] = nn.Parameter(torch.zeros_like(grad))
            annotate(params[name], gradient.spec, name)
        optimizer = ParallelOptimizer(torch.optim.SGD(params.values(), lr=1.0), registry, max_norm=dense_norm(case) / 2)
        losses = [(param * held[name].local(registry)).sum() for name, param in params.items()]
        optimizer.backward(torch.stack(losses).sum())
        stats = optimizer.step()
        assert stats is not None
        for name, param in params.items():
            clipped = held[name].complete(registry) * (dense_norm(case) / 2 / (dense_norm(case) + 1e-6))
            torch.testing.assert_close(-param.detach(), clipped, rtol=1e-6, atol=0)
        return wrong, float(stats.total_norm)


def fp16_norms() -> tuple[float, float]:
    """Return the norm of the scaled gradients after backward, and the reported norm."""
    with ProcessGroupRegistry(TENSOR) as registry:
        weight = nn.Parameter(torch.zeros(1))
        annotate(weight, P("tensor"), "weight")
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = ParallelOptimizer(sgd, registry, precision=TorchFp16(init_scale=4.0), max_norm=0.2)
        optimizer.backward((weight * (0.3, 0.4)[registry.rank("tensor")]).sum())
        assert weight.grad is not None
        scaled = sqrt(summed(square(weight.grad.double()), registry, "tensor"))
        stats = optimizer.step()
        assert stats is not None
        return scaled, float(stats.total_norm)


def test_reported_norm_with_loss_scale_is_norm_of_unscaled_gradients(world: World) -> None:
    """ColossalAI reported 2.0 instead of 0.5."""
    for scaled, ours in world.run(2, fp16_norms):
        assert scaled == pytest.approx(2.0, rel=1e-6)
        assert ours == pytest.approx(0.5, rel=1e-6)


def norms_of_order_1() -> tuple[float, float]:
    """Return the sum of squares, and the norm of order 1 from `global_norm`."""
    with ProcessGroupRegistry(TENSOR) as registry:
        weight = nn.Parameter(torch.zeros(1))
        annotate(weight, P("tensor"), "weight")
        weight.grad = torch.tensor([(3.0, 4.0)[registry.rank("tensor")]])
        return summed(square(weight.grad), registry, "tensor"), float(global_norm([weight], registry, 1.0).total_norm)


def test_norm_of_order_1_is_sum_of_absolute_values(world: World) -> None:
    """DeepSpeed reported 25 instead of 7."""
    assert world.run(2, norms_of_order_1) == [(25.0, 7.0)] * 2


def dense_norm(case: Published) -> float:
    return sqrt(sum(value**2 for gradient in case.gradients.values() for value in gradient.full))


@pytest.mark.parametrize("name", CASES)
def test_norm_matches_dense_norm_in_published_cases_of_wrong_norms(world: World, name: str) -> None:
    case = CASES[name]
    assert dense_norm(case) == pytest.approx(case.true, rel=case.digits)
    found = world.run(case.topology.world_size, measured, name)
    for (wrong, ours), reported in zip(found, case.by_rank(), strict=True):
        assert wrong == pytest.approx(reported, rel=case.digits)
        assert abs(wrong / case.true - 1) > 1e-5, "the wrong rule must give a wrong norm"
        assert ours == pytest.approx(dense_norm(case), rel=1e-6)
