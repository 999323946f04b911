"""`reload_from_model` accepts weights that other code wrote to the model between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import HalfStates, Offloaded, ParallelOptimizer, Replayable, Sharded, StatePlacement
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import nn
from world import World
from zero_models import small_buckets

ZERO1, ZERO2 = Sharded("data"), Sharded("data", gradients=True)
STATES: dict[str, tuple[StatePlacement, ...]] = {
    "whole": (),
    "ZeRO-1": (ZERO1,),
    "ZeRO-2": (ZERO2,),
    "offload": (Offloaded(1.0),),
    "half states": (HalfStates(),),
    "replay": (Replayable(),),
    "ZeRO-2, offload": (ZERO2, Offloaded(0.5)),
}
MODES: dict[str, tuple[Any, torch.dtype]] = {
    "fp32": ("fp32", torch.float32),
    "bf16": (Bf16(), torch.bfloat16),
    "bf16 half gradients": (Bf16(main_grads=False), torch.bfloat16),
    "split": (Bf16(split_masters=True), torch.bfloat16),
    "stochastic": (Bf16(stochastic_rounding=True), torch.bfloat16),
    "fp16_naive": (NaiveFp16(init_scale=64.0), torch.float16),
}


def written(mode: str, states: tuple[StatePlacement, ...], reload: bool) -> float | str:
    """Train two steps, clamp all weights through ``.data``, and step again, with `reload_from_model` before if ``reload``.

    Return the largest error of a weight, compared with SGD from the clamped weights; or the text of the error if the
    optimizer cannot be constructed.
    """
    precision, dtype = MODES[mode]
    with ProcessGroupRegistry(Topology(data=2)) as registry, small_buckets(16):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(dtype)
        weight = next(model.parameters())
        weight.data = weight.detach().t().contiguous().t()  # so its ZeRO shards are copies
        declare(model, {"*": P()})
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.125)
        try:
            optimizer = ParallelOptimizer(sgd, registry, precision=precision, states=states)
        except ValueError as error:
            return str(error)
        params = list(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            optimizer.backward(sum((param.float().square().sum() for param in params), torch.zeros(())))
            optimizer.step()

        for _ in range(2):
            step()
        for param in params:
            param.data.clamp_(-0.0625, 0.03125)
        if reload:
            optimizer.reload_from_model()
        kept = [param.detach().clone().float() for param in params]
        step()
        return max(
            float(((param.detach().float() - before * 0.75).abs() / before.abs().clamp(min=2**-20)).max())
            for param, before in zip(params, kept, strict=True)
        )


@pytest.mark.parametrize("states", STATES)
def test_reload_from_model_accepts_weights_written_through_param_data(world: World, states: str) -> None:
    for mode in MODES:
        for off in world.run(2, written, mode, STATES[states], True):
            if isinstance(off, str):
                assert "leave" in off, (mode, off)
            else:
                assert off <= (1e-6 if mode == "fp32" else 2**-7), mode


@pytest.mark.parametrize(("mode", "states"), [("bf16", "whole"), ("fp32", "offload"), ("bf16", "ZeRO-2")])
def test_written_weights_with_master_or_offloaded_copy_are_lost_without_reload_from_model(
    world: World, mode: str, states: str
) -> None:
    """docs/reference/LIMITS.md documents this limit."""
    assert all(isinstance(off, float) and off > 0.5 for off in world.run(2, written, mode, STATES[states], False))


@pytest.mark.parametrize("steps", [1, 3])
def test_replacing_data_of_parameter_with_master_weight_raises_if_values_differ(steps: int) -> None:
    """The second step compares all weights, the fourth only those with new memory."""
    with ProcessGroupRegistry(Topology()) as registry:
        model = nn.Linear(3, 2).bfloat16()
        declare(model, {"*": P()})
        optimizer = ParallelOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), registry, precision="bf16")
        model.weight.data = model.weight.data.clone()  # the same values
        for _ in range(steps):
            optimizer.backward(model(torch.ones(1, 3).bfloat16()).float().sum())
            optimizer.step()
            optimizer.zero_grad()
        model.weight.data = torch.zeros(2, 3).bfloat16()
        optimizer.backward(model(torch.ones(1, 3).bfloat16()).float().sum())
        with pytest.raises(RuntimeError, match=r"weight was changed since the last step.*reload_from_model\(\)"):
            optimizer.step()
        optimizer.reload_from_model()
        assert bool((optimizer.stepped_tensors()[0].tensor == 0).all())
