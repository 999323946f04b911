"""`align_replicas` for diverged replicas, and `broadcast_weights` for DTensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from meshstep.amp import Bf16
from meshstep.optim import (
    HalfStates,
    Offloaded,
    ParallelOptimizer,
    Sharded,
    StatePlacement,
    align_replicas,
    broadcast_weights,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.parallel.mesh.agreement import gather_objects
from optimizers import adamw
from torch import Tensor, nn
from world import World
from zero_models import small_buckets

MODES: dict[str, Any] = {"fp32": "fp32", "bf16": "bf16", "rounded": Bf16(stochastic_rounding=True)}
MODES["split masters"] = Bf16(split_masters=True)
STATES: dict[str, tuple[StatePlacement, ...]] = {
    "whole": (),
    "sharded": (Sharded("data"),),
    "offloaded": (Offloaded(0.5),),
    "sharded, offloaded": (Sharded("data"), Offloaded(0.5)),
    "half": (HalfStates(),),
}
CASES = [(mode, states) for mode in MODES for states in STATES if (mode, states) != ("rounded", "half")]
Values = dict[tuple[str, str], list[Tensor]]


def parameters(registry: ProcessGroupRegistry, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    kernel = torch.ones(4, 2, 3, 3).to(memory_format=torch.channels_last)
    given = {"whole": (torch.ones(37), P()), "kernel": (kernel, P()), "split": (torch.ones(5, 4), P("tensor"))}
    if "pipe" in registry.topology.axes:
        given["tied"] = torch.ones(6, 3), P(tied={"pipe": (0, -1)})
    params = {name: nn.Parameter(value.to(dtype)) for name, (value, _) in given.items()}
    for name, param in params.items():
        annotate(param, given[name][1], name)
    return params


def values(optimizer: ParallelOptimizer) -> Values:
    """Return each stepped tensor with its optimizer state, by name and region of the full tensor."""
    found = {}
    for piece, state in zip(optimizer.stepped_tensors(), optimizer._chain.states(), strict=True):
        tensors = [piece.tensor, *(state[key] for key in sorted(state) if key != "step")]
        found[piece.name, str(piece.region)] = [tensor.detach().clone() for tensor in tensors]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def step(optimizer: ParallelOptimizer, params: dict[str, nn.Parameter]) -> None:
    with optimizer.window():
        for name, param in params.items():
            gradient = torch.full_like(param, 0.1 * len(name), dtype=param.grad_dtype or param.dtype)
            param.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def apart(axes: dict[str, int], mode: str, states: str, align: bool) -> str:
    """Add different noise to weights and state on every rank, and align replicas if ``align``.

    Return the first difference from the values of the first rank or between replicas afterwards, or "".
    """
    with (
        ProcessGroupRegistry(Topology(roles=None, **axes)) as registry,
        small_buckets(64),
        mock.patch("meshstep.optim.recipe.data_parallel.BUCKET_BYTES", 64),
    ):
        dtype = torch.float32 if mode == "fp32" else torch.bfloat16
        params = parameters(registry, dtype)
        optimizer = ParallelOptimizer(
            adamw(params.values()),
            registry,
            precision=MODES[mode],
            states=STATES[states],
            check_replicas=True,
        )
        step(optimizer, params)
        generator = torch.Generator().manual_seed(registry.global_rank)
        with torch.no_grad():
            for piece, state in zip(optimizer.stepped_tensors(), optimizer._chain.states(), strict=True):
                for key, tensor in {"it": piece.tensor, **state}.items():
                    if key == "remainder":
                        tensor.add_(registry.global_rank)
                    elif key != "step":
                        tensor.mul_(1 + 0.05 * torch.rand(tensor.shape, generator=generator))
        before = gather_objects(values(optimizer), registry)
        if align:
            align_replicas(optimizer)
        after = gather_objects(values(optimizer), registry)
        model = gather_objects({name: param.detach().clone() for name, param in params.items()}, registry)
        if registry.topology.pipe_axes:
            for rank, of_rank in enumerate(model):  # only a tied parameter is the same parameter on both stages
                stage = registry.topology.coordinate_of(rank, "pipe")
                model[rank] = {name if name == "tied" else f"{name} {stage}": param for name, param in of_rank.items()}
        problem = compared(before, after, registry.topology) or equal_in(model, registry.topology)
        if not problem:
            step(optimizer, params)  # compares replicas again, and master weights with the model
        return problem


def compared(before: list[Values], after: list[Values], topology: Topology) -> str:
    """Check that each shard in ``after`` equals that of the first rank that holds it in ``before``. Stages are compared
    separately, except for tied parameters.

    Return the first difference, or "".
    """
    for rank, pieces in enumerate(after):
        for key, tensors in pieces.items():
            pipe = topology.pipe_axes and key[0] != "tied"
            first = next(
                other
                for other, of_other in enumerate(before)
                if key in of_other
                and (not pipe or topology.coordinate_of(other, "pipe") == topology.coordinate_of(rank, "pipe"))
            )
            if not same(tensors, before[first][key]):
                return f"{key} on rank {rank} is not what rank {first} had"
    return ""


def equal_in(model: list[dict[str, Tensor]], topology: Topology) -> str:
    """Check that replicated parameters of the model are equal. Return the first difference, or ""."""
    for rank, params in enumerate(model):
        for name, param in params.items():
            along = [axis for axis in topology.axes if axis == "tensor" and name.startswith("split")]
            for other, others in enumerate(model):
                copies = all(topology.coordinate_of(rank, a) == topology.coordinate_of(other, a) for a in along)
                if copies and name in others and not torch.equal(param, others[name]):
                    return f"{name} differs between ranks {rank} and {other}"
    return ""


@pytest.mark.parametrize(("mode", "states"), CASES)
def test_align_replicas_gives_all_replicas_the_values_of_first_rank(world: World, mode: str, states: str) -> None:
    assert world.run(4, apart, {"data": 2, "tensor": 2}, mode, states, True) == [""] * 4


@pytest.mark.parametrize("mode", MODES)
def test_align_replicas_aligns_tied_parameters_of_stages(world: World, mode: str) -> None:
    assert world.run(4, apart, {"pipe": 2, "tensor": 2}, mode, "whole", True) == [""] * 4


def test_replicas_stay_diverged_without_align_replicas(world: World) -> None:
    """Negative control of the comparison in `apart`."""
    assert all(world.run(4, apart, {"data": 2, "tensor": 2}, "bf16", "whole", False)[1:])


def stepped_on_one_rank() -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        params = parameters(registry, torch.float32)
        optimizer = ParallelOptimizer(adamw(params.values()), registry)
        if registry.global_rank == 1:
            for param in params.values():
                optimizer.state[param]["exp_avg"] = torch.ones_like(param)
        before = values(optimizer)
        with pytest.raises(ValueError, match="replicas can't be aligned") as error:
            align_replicas(optimizer)
        assert all(same(tensors, before[key]) for key, tensors in values(optimizer).items())
        return str(error.value)


def test_align_replicas_raises_on_every_rank_if_only_one_has_optimizer_state(world: World) -> None:
    first, second = world.run(2, stepped_on_one_rank)
    assert first == second
    assert "whole: tensor (37,) torch.float32, exp_avg (37,) torch.float32 on rank 1, but whole: tensor (37,)" in first


def broadcast_dtensors(layout: str) -> list[float]:
    """Set this rank's weights to its rank number, broadcast the weights, and return them."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    with ProcessGroupRegistry(Topology(data=2, tensor=2)) as registry:
        layouts: dict[str, tuple[Any, list[Any]]] = {
            "tensor shards": (registry.device_mesh("tensor"), [Shard(0)]),
            "replicated over data": (registry.device_mesh("data", "tensor"), [Replicate(), Shard(0)]),
            "data shards": (registry.device_mesh("data"), [Shard(0)]),
        }
        mesh, placements = layouts[layout]
        model: Any = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, placements))
        model.bias = nn.Parameter(torch.full((1,), float(registry.global_rank)))
        local = model.weight.to_local()
        assert isinstance(model.weight, DTensor)
        with torch.no_grad():
            local.fill_(registry.global_rank)
        broadcast_weights(model, registry)
        return [*model.weight.to_local().tolist(), *model.bias.tolist()]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("tensor shards", [[0, 0], [1, 1], [0, 0], [1, 1]]),
        ("replicated over data", [[0, 0], [1, 1], [0, 0], [1, 1]]),
        ("data shards", [[0, 0], [1, 1], [2, 0], [3, 1]]),
    ],
)
def test_broadcast_weights_copies_local_tensors_of_dtensors_along_replicated_data_axes(
    world: World, layout: str, expected: list[list[float]]
) -> None:
    assert world.run(4, broadcast_dtensors, layout) == expected
