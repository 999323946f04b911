"""Any layout x precision x sharding x offload x accumulation x clipping: the steps of a float64 model written down here.

The reference knows nothing of groups, buckets or windows: the loss is a sum of products of parameters with numbers that
a seed gives, so that the gradient of every piece can be written down from the definition of its layout.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, NamedTuple
from unittest import mock

import torch
from arguments import arguments
from cases import slice_of
from hypothesis import strategies as st
from meshstep.amp import NaiveFp16
from meshstep.optim import ParallelOptimizer
from meshstep.optim.gradients import sync as gradient_sync
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from properties import random_cases
from torch import Tensor, nn
from world import World
from zero_models import small_buckets

STEPS = 3
LAYOUTS = {
    "data x tensor": Topology(data=2, tensor=2),
    "experts": Topology(roles={"expert": "data"}, data=2, expert=2),
    "stages": Topology(pipe=2, data=2),
    "three replicas": Topology(data=3),
}
PRECISIONS: dict[str, tuple[Any, torch.dtype, float]] = {  # the rounding of the weights, relative to the largest
    "fp32": ("fp32", torch.float32, 1e-6),
    "bf16": ("bf16", torch.bfloat16, 2**-8),
    "fp16_naive": (NaiveFp16(init_scale=64.0), torch.float16, 2**-11),
}


@dataclass(frozen=True)
class Case:
    layout: str
    precision: str
    sharding: str
    offload: float | None
    micro: int
    managed: bool
    weighted: bool
    norm_type: float
    max_norm: float | None
    group_max_norm: float | None
    reduction: Any
    bucket: int
    seed: int

    @property
    def topology(self) -> Topology:
        return LAYOUTS[self.layout]

    def random(self, *key: object) -> random.Random:
        return random.Random(str((self.seed, *key)))


class Logical(NamedTuple):
    """A parameter of the whole model; ``stage``: the only one that has it."""

    name: str
    spec: P
    shape: tuple[int, ...]
    stage: int | None = None
    group: int = 0


def model_of(topology: Topology) -> Iterator[Logical]:
    for stage in range(2) if "pipe" in topology.axes else (None,):
        yield Logical(f"matrix {stage}", P(), (7, 5), stage)
        yield Logical(f"vector {stage}", P(), (13,), stage, group=1)
    if "tensor" in topology.axes:
        yield Logical("split", P("tensor"), (6, 3))
        yield Logical("terms", P(partial="tensor"), (9,), group=1)
        yield Logical("owned", P(owned={"tensor": 1}), (4,))
    if "expert" in topology.axes:
        yield Logical("experts", P("expert"), (4, 6))
    if "pipe" in topology.axes:
        yield Logical("tied", P(tied={"pipe": (0, -1)}), (11,), group=1)


# The reference ----------------------------------------------------------------------------------------------------------


def held(case: Case, coordinate: dict[str, int]) -> list[Logical]:
    def here(logical: Logical) -> bool:
        return logical.stage in (None, coordinate.get("pipe")) and all(
            coordinate[a] == i for a, i in logical.spec.owned
        )

    return [logical for logical in model_of(case.topology) if here(logical)]


def numbers(case: Case, logical: Logical, coordinate: dict[str, int], step: int, micro: int) -> Tensor:
    """What this rank's piece is multiplied with: eighths, which all dtypes here hold exactly."""
    axes = {*case.topology.data_axes, *logical.spec.partial, *dict(logical.spec.tied)}
    seed = case.random(logical.name, step, micro, sorted((axis, coordinate[axis]) for axis in axes)).getrandbits(32)
    full = torch.randint(-16, 17, logical.shape, generator=torch.Generator().manual_seed(seed)) / 8
    return slice_of(full.double(), logical.spec, case.topology, case.topology.rank(**coordinate))


def weight(case: Case, coordinate: dict[str, int], step: int, micro: int) -> int:
    """Of the micro-batch on this data coordinate; 0: there is nothing in it."""
    at = tuple(coordinate[axis] for axis in case.topology.data_axes)
    drawn = case.random("weight", step, micro, at).randrange(4) if any(at) or micro else 1
    return drawn if case.weighted or not case.managed else min(drawn, 1)


def gradient(case: Case, logical: Logical, coordinate: dict[str, int], step: int) -> Tensor:
    """Of the piece that the rank at ``coordinate`` has: from the definition of its layout."""
    topology, spec = case.topology, logical.spec
    summed = {*(axis for axis in topology.data_axes if axis not in spec.named_axes), *spec.partial, *dict(spec.tied)}
    ranges = [range(topology.size(axis)) if axis in summed else (coordinate[axis],) for axis in topology.axes]
    total = torch.zeros_like(numbers(case, logical, coordinate, step, 0))
    for at in product(*ranges):
        other = dict(zip(topology.axes, at, strict=True))
        for micro in range(case.micro):
            if weight(case, other, step, micro):
                total += numbers(case, logical, other, step, micro)
    data_ranks = topology.size(*topology.data_axes)
    return total / (whole_weight(case, step) if case.weighted or case.managed else data_ranks)


def whole_weight(case: Case, step: int) -> int:
    coordinates = {}
    for rank in range(case.topology.world_size):
        coordinate = case.topology.coordinate(rank)
        coordinates[tuple(coordinate[axis] for axis in case.topology.data_axes)] = coordinate
    return sum(weight(case, at, step, micro) for at in coordinates.values() for micro in range(case.micro))


def norms(case: Case, step: int) -> list[float]:
    """By param group: of every distinct piece once."""
    powers: list[dict[Any, Tensor]] = [{}, {}]
    for rank in range(case.topology.world_size):
        coordinate = case.topology.coordinate(rank)
        for logical in held(case, coordinate):
            key = logical.name, tuple(coordinate[axis] for axis in logical.spec.sharded_axes)
            powers[logical.group][key] = gradient(case, logical, coordinate, step)
    return [
        float(torch.linalg.vector_norm(torch.cat([piece.flatten() for piece in group.values()]), case.norm_type))
        for group in powers
    ]


def coefficients(case: Case, by_group: list[float]) -> list[float]:
    def clip(norm: float, threshold: float | None) -> float:
        return 1.0 if threshold is None else min(1.0, threshold / (norm + 1e-6))

    if case.group_max_norm is not None:
        return [clip(by_group[0], case.max_norm), clip(by_group[1], case.group_max_norm)]
    total = float(torch.linalg.vector_norm(torch.tensor(by_group, dtype=torch.float64), case.norm_type))
    return [clip(total, case.max_norm)] * 2


# The steps --------------------------------------------------------------------------------------------------------------


def groups_of(case: Case, logicals: list[Logical], params: list[nn.Parameter]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "max_norm": case.group_max_norm}]
    for logical, param in zip(logicals, params, strict=True):
        groups[logical.group]["params"].append(param)
    return groups


def problems_of(case: Case) -> list[str]:
    """On this rank."""
    small_sums = mock.patch.object(gradient_sync, "BUCKET_BYTES", case.bucket)
    with ProcessGroupRegistry(case.topology) as registry, small_buckets(case.bucket), small_sums:
        coordinate = registry.coordinate
        logicals = held(case, coordinate)
        precision, dtype, rounding = PRECISIONS[case.precision]
        params, expected = [], []
        for logical in logicals:
            seed = torch.Generator().manual_seed(sum(map(ord, logical.name)))
            full = torch.randint(-8, 9, logical.shape, generator=seed).double() / 8
            piece = slice_of(full, logical.spec, case.topology, registry.global_rank)
            params.append(nn.Parameter(piece.to(dtype)))
            expected.append(nn.Parameter(params[-1].detach().double()))
            annotate(params[-1], logical.spec, logical.name)
        options: dict[str, Any] = {}
        if case.sharding != "whole":
            options = {"shard_states": "data", "shard_gradients": case.sharding == "zero2"}
        optimizer = ParallelOptimizer(
            torch.optim.SGD(groups_of(case, logicals, params), lr=0.05, momentum=0.9, fused=True),
            registry,
            **arguments(
                precision=precision,
                max_norm=case.max_norm,
                norm_type=case.norm_type,
                accumulation_steps=case.micro if case.managed else None,
                offload=case.offload,
                reduction=case.reduction,
                check_replicas=True,
                **options,
            ),
        )
        reference = torch.optim.SGD(groups_of(case, logicals, expected), lr=0.05, momentum=0.9)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(case.micro):
                count = weight(case, coordinate, step, micro)
                loss = torch.zeros((), requires_grad=True) * 1.0
                for logical, param in zip(logicals, params, strict=True):
                    loss = loss + (param.float() * numbers(case, logical, coordinate, step, micro).float()).sum()
                weighted = {"weight": count} if case.weighted else {}
                optimizer.backward(loss if count else None, **weighted)
            stats = optimizer.step()
            assert stats is not None
            by_group = norms(case, step)
            total = float(torch.linalg.vector_norm(torch.tensor(by_group, dtype=torch.float64), case.norm_type))
            if abs(float(stats.total_norm) / total - 1) > 1e-6:
                found.append(f"step {step}: norm {float(stats.total_norm)} for {total}")
            for logical, param in zip(logicals, expected, strict=True):
                param.grad = gradient(case, logical, coordinate, step) * coefficients(case, by_group)[logical.group]
            reference.step()
        for logical, param, wanted in zip(logicals, params, expected, strict=True):
            error = float((param.double() - wanted).abs().max() / wanted.abs().max())
            if error > 2 * rounding:
                found.append(f"{logical.name} is {error:.1e} off")
        return found


CASES = st.builds(
    Case,
    layout=st.sampled_from(sorted(LAYOUTS)),
    precision=st.sampled_from(sorted(PRECISIONS)),
    sharding=st.sampled_from(["whole", "zero1", "zero2"]),
    offload=st.sampled_from([None, 0.5, 1.0]),
    micro=st.integers(1, 3),
    managed=st.booleans(),
    weighted=st.booleans(),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, inf]),
    max_norm=st.sampled_from([None, 0.7, 30.0]),
    group_max_norm=st.sampled_from([None, 0.3]),
    reduction=st.sampled_from(["packed", "per_group"]),
    bucket=st.sampled_from([64, 200, 2**25]),
    seed=st.integers(0, 1000),
)


@random_cases(CASES, 120)
def test_any_configuration(world: World, drawn: list[Case]) -> None:
    for by_rank in world.run_each(problems_of, [(case.topology.world_size, (case,)) for case in drawn]):
        assert not any(by_rank)
