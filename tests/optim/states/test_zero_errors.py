"""Unsupported options and misuse of ZeRO-1 and ZeRO-2 raise errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from arguments import arguments
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from optimizers import adamw
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World, WorldError
from zero_models import ZERO1, ZERO2, wide_model


def refused(kind: str) -> str:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model: Any = wide_model()
        options: dict[str, Any] = dict(ZERO1)
        params: Any = list(model.parameters())
        make: Callable[[Any], torch.optim.Optimizer] = adamw
        if kind == "axis":
            options = {"shard_states": "tensor"}
        elif kind == "ddp":
            options = {**ZERO2, "data_parallel": DistributedDataParallel(model)}
        elif kind == "average_data=False":
            options = {**ZERO2, "average_data": False}
        elif kind == "optimizer":
            make = partial(torch.optim.Adafactor, lr=1e-2)
        elif kind == "offload":
            options = {"offload": 1.5}
        elif kind == "frozen on one rank":
            model[0].weight.requires_grad_(registry.coordinate["data"] == 0)
        before = [id(param) for param in params]
        inner = make(params)
        try:
            optimizer = ParallelOptimizer(inner, registry, **arguments(**options))
        except ValueError as error:
            assert [id(param) for group in inner.param_groups for param in group["params"]] == before
            return str(error)
        other = ParallelOptimizer(
            adamw(wide_model().parameters()), registry, **arguments(**({} if kind == "whole" else ZERO1))
        )
        state = other.state_dict()
        if kind == "cut":
            state["meshstep"]["weights"]["shards"]["pieces"] = []
        with pytest.raises(ValueError, match="the state was saved") as caught:
            optimizer.load_state_dict(state)
        return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("axis", "the mesh has no such axis or alias (axes: data)"),
        ("ddp", "leave data_parallel out and don't wrap the model, or leave gradients=True out"),
        ("average_data=False", "remove average_data=False and the code that averages gradients, or leave"),
        ("optimizer", "optimizer.elementwise = True"),
        ("offload", "Offloaded(1.5)"),
        ("frozen on one rank", "param group 0, frozen]"),
        ("whole", "with optimizer states unsharded"),
        ("cut", "in 0 shards"),
    ],
)
def test_zero_rejects_unsupported_options_and_states_on_all_ranks(world: World, kind: str, says: str) -> None:
    for text in world.run(2, refused, kind):
        assert says in text


def misused(kind: str) -> None:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = wide_model()
        optimizer = ParallelOptimizer(adamw(model.parameters()), registry, **arguments(**ZERO2))
        x = torch.randn(8, 64, requires_grad=True)
        if kind == "not cleared":
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.backward(model(x).square().mean())
        elif kind == "backward without optimizer":
            optimizer.backward(model(x).square().mean())
            model(x).square().mean().backward()
            optimizer.step()
        else:
            y = checkpoint(model, x, use_reentrant=True)
            optimizer.backward(checkpoint(model, y, use_reentrant=True).square().mean())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("not cleared", "call zero_grad"),
        ("backward without optimizer", "got a gradient from a backward that the optimizer did not run"),
        ("twice in one backward", "second gradient in one backward"),
    ],
)
def test_misuse_of_zero2_gradients_raises(world: World, kind: str, says: str) -> None:
    with pytest.raises(WorldError, match=says):
        world.run(2, misused, kind)
