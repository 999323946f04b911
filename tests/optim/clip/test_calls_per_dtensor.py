"""The Python work of `clip_grad_norm_` without a registry is linear in the number of DTensors, also in the first call."""

from __future__ import annotations

import pytest
import torch
from function_calls import calls_of
from meshstep.optim import clip_grad_norm_
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from world import World


def params_on_two_meshes(count: int) -> list[nn.Parameter]:
    data = init_device_mesh("cpu", (2,), mesh_dim_names=(f"data_{count}",))
    experts = init_device_mesh("cpu", (1, 2), mesh_dim_names=(f"rest_{count}", f"expert_{count}"))

    def tensor(index: int) -> Tensor:
        mesh, placements = ((data, (Shard(0),)), (experts, (Replicate(), Shard(0))))[index % 2]
        return DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)

    params = [nn.Parameter(tensor(index)) for index in range(count)]
    for index, param in enumerate(params):
        param.grad = tensor(index)
    return params


def function_calls(params: list[nn.Parameter]) -> int:
    return calls_of(lambda: clip_grad_norm_(params, 1.0))


def first_and_warm(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    every = [params_on_two_meshes(count) for count in counts]
    function_calls(every[0])  # warms up imports and process-wide caches
    return [(function_calls(params), function_calls(params)) for params in every[1:]]


@pytest.mark.long
def test_python_calls_of_clip_without_registry_grow_linearly_with_parameters(world: World) -> None:
    for (first, warm), (first_of_twice, warm_of_twice) in world.run(2, first_and_warm, (10, 200, 400)):
        assert warm_of_twice <= 2.02 * warm
        assert first_of_twice <= 2.02 * first
        assert warm_of_twice / 400 < 20
