"""`whole`, which lets a wrapped optimizer step full tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.optim.whole import whole
from meshstep.optim.whole.any_optimizer import flattened, nested
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from planted import LAYOUTS, Planted, parts, run_step, start
from third_party import SignDescent, TrustRatio, under_the_name
from torch import Tensor, nn
from whole_runs import alone, largest_error, step_both, trained
from world import World


class Odd(torch.optim.Optimizer):
    """An optimizer with state in lists and dicts, counts in its group and attributes, and norms of full tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls = 0
        super().__init__(params, {"lr": lr, "decay": (0.5, 0.75)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state.setdefault("sides", [torch.zeros(size, dtype=param.dtype) for size in param.shape] + [None])
                state.setdefault("said", {"kind": "odd", "seen": 0, "moments": (torch.zeros_like(param), 0.5)})
                state["said"]["seen"] += 1
                for dim, side in enumerate(state["sides"][:-1]):
                    side.lerp_(param.grad.square().movedim(dim, 0).reshape(len(side), -1).sum(1), group["decay"][0])
                moment, weight = state["said"]["moments"]
                moment = moment * weight + param.grad / (1 + sum(side.sum().sqrt() for side in state["sides"][:-1]))
                state["said"]["moments"] = moment, weight
                param.sub_(moment * moment.norm(), alpha=group["lr"] / (group["t"] * self.calls))


def odd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return whole(Odd(params))


def trust(params: Iterable[Any]) -> torch.optim.Optimizer:
    return whole(TrustRatio(params))


def two_groups(params: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    named = list(params)
    large = [one for one in named if one[0] in ("up", "down")]
    return whole(Odd([{"params": large, "lr": 0.2}, {"params": [one for one in named if one not in large]}]))


@pytest.mark.long
@pytest.mark.parametrize("make", [odd, trust, two_groups])
def test_custom_optimizer_wrapped_by_whole_matches_single_process_on_sharded_layouts(world: World, make: Any) -> None:
    layouts = [LAYOUTS[name] for name in ("grid", "data x tensor", "pipe, tied")]
    found = world.run_each(trained, [(layout.topology.world_size, (layout, make)) for layout in layouts])
    for layout, by_rank in zip(layouts, found, strict=True):
        assert largest_error(by_rank, alone(layout, make)) == 0


@pytest.mark.parametrize("make", [Odd, torch.optim.Adafactor, torch.optim.AdamW, torch.optim.Rprop])
def test_optimizer_wrapped_by_whole_without_sharding_matches_plain_optimizer(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((6, 10), (7,), (2, 3, 4))]
    theirs = [nn.Parameter(param.detach().clone()) for param in ours]
    one, other = whole(make(ours, lr=0.1)), make(theirs, lr=0.1)
    for _ in range(5):
        step_both(one, ours, other, theirs)
    for param, same in zip(ours, theirs, strict=True):
        assert torch.equal(param, same)


def with_schedule(split: bool, factor: float = 0.5) -> Tensor:
    axes = {"tensor": 2} if split else {}
    with ProcessGroupRegistry(Topology(roles=None, **axes)) as registry:
        full = start(("up", 0))
        weight = nn.Parameter(full.chunk(2)[registry.global_rank].clone() if split else full)
        annotate(weight, P("tensor") if split else P(), "weight")
        optimizer = ParallelOptimizer(whole(torch.optim.Adafactor([weight], lr=0.1)), registry, max_norm=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, factor)
        for step in range(4):
            optimizer.zero_grad()
            optimizer.backward((weight * (step + 1)).square().sum())
            optimizer.step()
            schedule.step()
        return weight.detach()


def test_optimizer_wrapped_by_whole_with_schedule_on_shards_matches_single_process(world: World) -> None:
    (dense,) = world.run(1, with_schedule, False)
    torch.testing.assert_close(torch.cat(world.run(2, with_schedule, True)), dense, rtol=1e-12, atol=1e-12)
    assert not torch.equal(dense, start(("up", 0)))
    assert not torch.allclose(dense, world.run(1, with_schedule, False, 1.0)[0], rtol=1e-3)


def without_wrapper() -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight = nn.Parameter(torch.randn(4, 4))
        annotate(weight, P("tensor"), "weight")
        with pytest.raises(ValueError, match="is not known to be elementwise") as caught:
            ParallelOptimizer(torch.optim.Adafactor([weight]), registry)
        ParallelOptimizer(whole(torch.optim.Adafactor([weight])), registry)
        return str(caught.value)


def test_error_for_unwrapped_optimizer_on_shards_suggests_wrapping_it_by_whole(world: World) -> None:
    for text in world.run(2, without_wrapper):
        assert "meshstep.optim.whole.whole(optimizer)" in text


def other_kinds() -> str:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        weight = nn.Parameter(torch.randn(4, 4))
        annotate(weight, P("tensor"), "weight")
        make = [TrustRatio, SignDescent][registry.global_rank]
        with pytest.raises(ValueError, match=r"Declare .* equally on all ranks") as caught:
            ParallelOptimizer(whole(make([weight])), registry)
        return str(caught.value)


def test_different_optimizers_wrapped_by_whole_on_two_ranks_raise(world: World) -> None:
    one, other = world.run(2, other_kinds)
    assert one == other
    assert "TrustRatio" in one
    assert "SignDescent" in one


class Modes(SignDescent):
    def train(self) -> None: ...
    def eval(self) -> None: ...


class Around(SignDescent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = SignDescent(params)


def test_whole_wrapper_rejects_unsupported_optimizers() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    stepped = torch.optim.AdamW([weight])
    weight.grad = torch.ones(4, 4)
    stepped.step()
    refused: list[tuple[Any, type[Exception], str]] = [
        (under_the_name("prodigyopt", "Prodigy")([weight]), ValueError, "from all parameters together"),
        (torch.optim.LBFGS([weight]), TypeError, "closure"),
        (stepped, ValueError, "already has a state"),
        (whole(SignDescent([weight])), TypeError, "already steps full tensors"),
        (Modes([weight]), ValueError, r"train\(\) and eval\(\)"),
        (Around([weight]), ValueError, "has another optimizer in its attribute base"),
        (nn.Linear(2, 2), TypeError, "not a plain torch optimizer"),
    ]
    for optimizer, kind, says in refused:
        with pytest.raises(kind, match=says):
            whole(optimizer)


def test_copy_of_optimizer_wrapped_by_whole_continues_identically() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))
    one = whole(Odd([weight]))
    weight.grad = torch.randn(4, 4)
    one.step()
    same, other = copy.deepcopy((weight, one))
    for param, optimizer in ((weight, one), (same, other)):
        param.grad = torch.ones(4, 4)
        optimizer.step()
    assert "whole(Odd" in repr(other)
    assert torch.equal(weight, same)


def test_nested_optimizer_state_is_restored_after_flattening() -> None:
    tensor, number = torch.randn(2, 3), torch.tensor(3)
    state = {"a": [tensor, None, {"b.c": (number, "x", 0.1)}], "a.0": True, 7: [], "plan": tensor}
    found = flattened(state)
    assert all(isinstance(value, Tensor) for value in found.values())
    again = nested(found, torch.device("cpu"))
    assert again.keys() == state.keys()
    assert again["a"][0] is tensor
    assert again["a"][2]["b.c"] == (number, "x", 0.1)
    assert type(again["a"][2]["b.c"]) is tuple
    assert (again["a.0"], again[7], again["plan"] is tensor) == (True, [], True)


def running() -> Any:
    layout = LAYOUTS["tensor"]
    with ProcessGroupRegistry(layout.topology) as registry:
        model = Planted(layout, registry.global_rank, torch.float64)
        optimizer = ParallelOptimizer(odd(model.named_parameters()), registry)
        for step in range(6):
            if step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = ParallelOptimizer(odd(model.named_parameters()), registry)
                optimizer.load_state_dict(saved)
            run_step(model, optimizer, step)
            optimizer.step()
        return parts(layout, optimizer)


def test_nested_states_of_optimizer_wrapped_by_whole_resume_from_state_dict(world: World) -> None:
    layout = LAYOUTS["tensor"]
    assert largest_error(world.run(2, running), alone(layout, odd, 6)) == 0
