"""An exception in the backward of a `fully_shard` module, after which torch no longer reduces all of its gradients."""

from __future__ import annotations

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from world import World

HAS_RESET = hasattr(FSDPModule, "reset_iter_state")  # torch 2.14 or later


def raises_at(module: nn.Module, where: str) -> torch.utils.hooks.RemovableHandle:
    """Make the next forward through ``module``, or its backward, raise KeyError."""

    def in_backward(gradient: Tensor) -> Tensor:
        raise KeyError("backward")

    def after_forward(module: nn.Module, inputs: object, output: Tensor) -> None:
        if where == "forward":
            raise KeyError("forward")
        output.register_hook(in_backward)

    return module.register_forward_hook(after_forward)


def weights_after(where: str | None, in_window: bool, reset: bool) -> list[list[float]] | str:
    """Step twice, with an exception between the steps. Return the weights, or the error of the second step.

    Args:
        where: "forward" or "backward", where the exception is raised; None: no exception.
        in_window: Run forward and backward in `ParallelOptimizer.window`, instead of `ParallelOptimizer.backward`.
        reset: Call torch's `reset_iter_state` after the exception.
    """
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        for module in (*model, model):
            fully_shard(module, mesh=registry.device_mesh("data"))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ParallelOptimizer(sgd, registry, data_parallel=model, max_norm=None)

        def backward(step: int) -> None:
            x = torch.linspace(-1, 1 + registry.global_rank + step, 8).view(2, 4)
            if not in_window:
                optimizer.backward(model(x).square().mean())
                return
            with optimizer.window():
                optimizer.scale_loss(model(x).square().mean()).backward()

        backward(0)
        optimizer.step()
        if where is not None:
            optimizer.zero_grad()
            handle = raises_at(model[0], where)
            with pytest.raises(KeyError, match=where):
                backward(1)
            handle.remove()
            if reset:
                model.reset_iter_state()  # type: ignore[operator]
        optimizer.zero_grad()
        try:
            backward(2)
        except RuntimeError as error:
            return str(error)
        optimizer.step()
        params = list(model.parameters())
        assert all(isinstance(param, DTensor) for param in params)
        return [param.full_tensor().flatten().tolist() for param in params]  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_window", [False, True])
def test_next_backward_raises_after_an_exception_in_the_backward_of_a_fully_shard_module(
    world: World, in_window: bool
) -> None:
    for error in world.run(2, weights_after, "backward", in_window, False):
        assert "an earlier backward raised within a fully_shard module" in error
        assert "call reset_iter_state() of the root module (torch 2.14 or later) and optimizer.zero_grad()" in error


@pytest.mark.parametrize("in_window", [False, True])
def test_exception_in_the_forward_of_a_fully_shard_module_does_not_change_later_steps(
    world: World, in_window: bool
) -> None:
    expected = world.run(2, weights_after, None, in_window, False)
    assert world.run(2, weights_after, "forward", in_window, False) == expected


@pytest.mark.skipif(not HAS_RESET, reason="needs FSDPModule.reset_iter_state of torch 2.14")
@pytest.mark.parametrize("in_window", [False, True])
def test_steps_after_aborted_backward_and_reset_iter_state_match_uninterrupted_run(
    world: World, in_window: bool
) -> None:
    expected = world.run(2, weights_after, None, in_window, False)
    assert world.run(2, weights_after, "backward", in_window, True) == expected
