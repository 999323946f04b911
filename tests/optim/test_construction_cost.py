"""Number of object all-gathers in the constructor of `ParallelOptimizer` and in the first call of `clip_grad_norm_`.

An object all-gather takes longer with more ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gathered_objects import objects_gathered_by
from meshstep.optim import ClipState, Muon, ParallelOptimizer, PerParameter, Sharded, clip_grad_norm_
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.parallel.mesh import process_group_collectives as objects
from torch import nn
from world import World

Found = dict[str, Counter[str]]


@contextmanager
def counted(count: Counter[str]) -> Iterator[None]:
    """Count gathers of objects in the block, and the messages that they need."""
    gather, message = objects.all_gather_objects, objects._gather_bytes

    def gathers(*args: Any) -> list[Any]:
        count["gathers"] += 1
        return gather(*args)

    def sends(*args: Any) -> list[bytes]:
        count["rounds"] += 1
        return message(*args)

    with pytest.MonkeyPatch.context() as patch, objects_gathered_by(gathers):
        patch.setattr(objects, "_gather_bytes", sends)
        yield


def set_up(layers: int) -> Found:
    topology = Topology(data=2, tensor=2)
    found: Found = {}

    def made(name: str, kind: Any = torch.optim.AdamW, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        model = nn.Sequential(*(nn.Linear(4, 4, dtype=dtype) for _ in range(layers)))
        for label, param in model.named_parameters():
            annotate(param, P("tensor") if param.dim() == 2 else P(), label)
        params = [param for param in model.parameters() if kind is not Muon or param.dim() == 2]
        with counted(found.setdefault(name, Counter())):
            ParallelOptimizer(kind(params, lr=1e-3), registry, **options)

    with ProcessGroupRegistry(topology) as registry:
        made("plain", max_norm=1.0)
        made("bf16", dtype=torch.bfloat16, precision="bf16")
        made("by parameter", max_norm=PerParameter(1.0))
        made("ZeRO-2", states=Sharded("data", gradients=True))
        made("whole tensors", Muon)
        params = [nn.Parameter(torch.ones(4)) for _ in range(layers)]
        for param in params:
            param.grad = torch.ones(4)
            annotate(param, P("tensor"))
        with counted(found.setdefault("clip_grad_norm_", Counter())):
            clip_grad_norm_(params, 1.0, registry=registry)
        with counted(found.setdefault("clip_grad_norm_ by parameter", Counter())):
            clip_grad_norm_(params, ClipState(PerParameter(1.0)), registry=registry)
    return found


def test_constructor_and_first_clip_need_at_most_two_object_gathers(world: World) -> None:
    expected = {"plain": 1, "bf16": 1, "by parameter": 1, "ZeRO-2": 2, "whole tensors": 2}
    expected |= {"clip_grad_norm_": 1, "clip_grad_norm_ by parameter": 1}
    for found in world.run(4, set_up, 3):
        assert {name: count["gathers"] for name, count in found.items()} == expected
        assert {name: count["rounds"] for name, count in found.items()} == expected, (
            "every gather must fit in one message"
        )


@pytest.mark.long
def test_constructing_optimizer_of_many_parameters_needs_one_additional_message(world: World) -> None:
    found = world.run(4, set_up, 150)[0]
    assert {name: found[name]["gathers"] for name in ("plain", "clip_grad_norm_")} == {"plain": 1, "clip_grad_norm_": 1}
    assert {name: found[name]["rounds"] for name in ("plain", "clip_grad_norm_")} == {
        "plain": 2,
        "clip_grad_norm_": 1,
    }
