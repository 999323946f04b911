"""An exception in the forward or backward of one rank: if that rank calls `step` too, all ranks skip the step and go on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer, Sharded
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare
from torch import Tensor, nn
from world import World

STEPS = 20
LATE = 17  # the error of the skipped step 1 is raised 16 steps later, and that step makes no update
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "overlap": {"overlap": True},
    "ZeRO-1": {"states": Sharded("data")},
    "ZeRO-2": {"states": Sharded("data", gradients=True)},
}


def fail(gradient: Tensor) -> Tensor:
    raise KeyError("in backward")


def train(options: str, where: str | None) -> tuple[list[int], list[float], int]:
    """Train, with an exception on rank 1 in step 1, in the forward or in backward; None: without steps 1 and `LATE`.

    Return the numbers of the steps that raised RuntimeError, the weights, and the number of skipped steps.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        declare(model, {"*": P()})
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = ParallelOptimizer(sgd, registry, max_norm=1.0, **OPTIONS[options])
        raised = []
        for step in range(STEPS):
            if where is None and step in (1, LATE):
                continue
            fails = where is not None and step == 1 and registry.global_rank == 1
            optimizer.zero_grad()
            with suppress(KeyError):
                hidden = model[0](torch.linspace(-1, 1 + registry.global_rank + step, 8).view(2, 4))
                if fails and where == "forward":
                    raise KeyError("in the forward")
                if fails:
                    hidden.register_hook(fail)
                optimizer.backward(model[1](hidden).square().mean())
            try:
                optimizer.step()
            except RuntimeError:
                raised.append(step)
        return (
            raised,
            torch.cat([param.detach().flatten() for param in model.parameters()]).tolist(),
            optimizer.skipped_steps,
        )


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_skip_a_step_with_an_exception_on_one_rank_and_go_on(world: World, options: str, where: str) -> None:
    (_, expected, _), _ = world.run(2, train, options, None)
    first, second = world.run(2, train, options, where)
    assert first == ([LATE], expected, 1)
    assert second == ([LATE] if where == "forward" else [1, LATE], expected, 1)
