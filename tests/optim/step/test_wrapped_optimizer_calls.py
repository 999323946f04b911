"""Direct calls of the torch optimizer that a `ParallelOptimizer` wraps."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from meshstep.amp import GradScaler, precision_of
from meshstep.optim import Offloaded, ParallelOptimizer, Replayable, Sharded, TorchStates, replay
from meshstep.optim.kernels.choice import chosen
from meshstep.optim.schedule import follow
from meshstep.optim.step.c_engine import loops_for
from meshstep.optim.step.update import may_step_in_several_calls
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, declare
from torch import Tensor, nn
from world import World

REFUSED = r"step\(\) was called on the {} that a ParallelOptimizer wraps.*: call step\(\) of the ParallelOptimizer"


def small(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    declare(model, {"*": P()})
    return model


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.named_parameters(), lr=0.1, **options)


def alone() -> ProcessGroupRegistry:
    return ProcessGroupRegistry(Topology())


def window(optimizer: ParallelOptimizer[Any], model: nn.Module, factor: float = 1.0) -> None:
    optimizer.backward(model(torch.linspace(-1, 2, 8).view(2, 4)).square().mean() * factor)


def stepped_by_the_wrapped_one(options: dict[str, Any]) -> tuple[bool, float]:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = small()
        inner = adamw(model, **options)
        optimizer = ParallelOptimizer(inner, registry, max_norm=0.5)
        for step in range(3):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            window(optimizer, model, 1.0 + registry.global_rank)
            with pytest.raises(RuntimeError, match=REFUSED.format("AdamW")):
                inner.step()
            assert torch.equal(before, model.weight), step
            assert inner.state or step == 0
            optimizer.step()
        return bool(torch.isfinite(model.weight).all()), float(model.weight.double().sum())


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=["plain", "fused", "single"])
def test_step_of_wrapped_optimizer_called_by_user_raises(world: World, options: dict[str, Any]) -> None:
    results = world.run(2, stepped_by_the_wrapped_one, options)
    assert results[0] == results[1]


def test_step_of_wrapped_optimizer_raises_before_user_hooks_run() -> None:
    model, ran = small(), list[str]()
    inner = adamw(model)
    inner.register_step_pre_hook(lambda *_: ran.append("hook"))
    optimizer = ParallelOptimizer(inner, alone())
    window(optimizer, model)
    with pytest.raises(RuntimeError, match=REFUSED.format("AdamW")):
        inner.step()
    assert not ran
    optimizer.step()
    assert ran == ["hook"]


def test_torch_grad_scaler_on_wrapped_optimizer_raises() -> None:
    model = small()
    inner = adamw(model)
    optimizer = ParallelOptimizer(inner, alone())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(RuntimeError, match=REFUSED.format("AdamW")):
        scaler.step(inner)
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_native_loops_step_a_wrapped_optimizer_only_if_it_is_fused(fused: bool) -> None:
    model = small()
    inner = adamw(model, fused=fused)
    optimizer = ParallelOptimizer(inner, alone(), max_norm=0.5)
    assert may_step_in_several_calls(inner) == fused
    if chosen.native is not None:
        assert (loops_for(inner) is not None) == fused
    window(optimizer, model)
    optimizer.step()


def by_schedule_on_wrapped_optimizer() -> None:
    model = small()
    inner = adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = ParallelOptimizer(inner, alone())
    follow(schedule, optimizer)
    for _ in range(2):
        window(optimizer, model)
        optimizer.step()
        schedule.step()
    assert inner.param_groups[0]["lr"] == 0.1 * 0.25


def by_grad_scaler() -> None:
    model, registry = small(), alone()
    optimizer = ParallelOptimizer(adamw(model, fused=True), registry)
    scaler = GradScaler(registry)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def by_replay() -> None:
    model = small()
    optimizer = ParallelOptimizer(adamw(model), alone(), states=Replayable())
    window(optimizer, model)
    optimizer.step()
    after = model.weight.detach().clone()
    replay(optimizer)
    assert torch.equal(model.weight, after)


def by_several() -> None:
    model = small()
    parts = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.Adam([model.bias], lr=0.1, fused=True)]
    optimizer = ParallelOptimizer(parts, alone())
    window(optimizer, model)
    optimizer.step()


@pytest.mark.parametrize("use", [by_schedule_on_wrapped_optimizer, by_grad_scaler, by_replay, by_several])
def test_step_of_wrapped_optimizer_is_allowed_in_schedule_grad_scaler_and_replay(use: Callable[[], None]) -> None:
    use()


def test_direct_calls_of_one_of_several_wrapped_optimizers_raise_except_zero_grad() -> None:
    model = small()
    sgd, adam = torch.optim.SGD([model.weight], lr=0.1), torch.optim.Adam([model.bias], lr=0.1)
    optimizer = ParallelOptimizer([sgd, adam], alone())
    window(optimizer, model)
    for part, kind in ((sgd, "SGD"), (adam, "Adam"), (optimizer.optimizer, r"SGD \+ Adam")):
        with pytest.raises(RuntimeError, match=REFUSED.format(kind)):
            part.step()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called on one of the optimizers"):
        sgd.load_state_dict(sgd.state_dict())
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) was called on one of the optimizers"):
        adam.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    sgd.zero_grad()
    assert model.bias.grad is None


def test_zero_grad_of_wrapped_optimizer_clears_model_gradients() -> None:
    model = small()
    precision_of("bf16").prepare(model)
    inner = adamw(model)
    optimizer = ParallelOptimizer(inner, alone(), precision="bf16", max_norm=0.5)
    window(optimizer, model)
    inner.zero_grad()
    window(optimizer, model)
    once = float(optimizer.step().total_norm)
    optimizer.zero_grad()
    reference = small()
    precision_of("bf16").prepare(reference)
    other = ParallelOptimizer(adamw(reference), alone(), precision="bf16", max_norm=0.5)
    window(other, reference)
    assert once == float(other.step().total_norm)


def test_zero_grad_of_wrapped_optimizer_is_ignored_within_accumulation_window() -> None:
    model = small()
    inner = adamw(model)
    optimizer = ParallelOptimizer(inner, alone(), accumulation_steps=2)
    window(optimizer, model)
    inner.zero_grad()
    assert model.weight.grad is not None
    window(optimizer, model)
    assert optimizer.step() is not None


def test_load_state_dict_of_wrapped_optimizer_requires_master_weights_in_bf16() -> None:
    model = small()
    inner = adamw(model)
    optimizer = ParallelOptimizer(inner, alone())
    window(optimizer, model)
    optimizer.step()
    plain = copy.deepcopy(inner.state_dict())
    window(optimizer, model)
    optimizer.step()
    inner.load_state_dict(plain)
    assert float(inner.state[model.weight]["step"]) == 1.0

    half = small()
    precision_of("bf16").prepare(half)
    masters = adamw(half)
    with_masters = ParallelOptimizer(masters, alone(), precision="bf16")
    assert with_masters.param_groups is masters.param_groups
    with pytest.raises(ValueError, match="the state is a torch optimizer's, but precision='bf16' also needs"):
        masters.load_state_dict(masters.state_dict())


def group_added_to_the_wrapped_one() -> Tensor:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model, more = small(), nn.Parameter(torch.ones(3))
        declare(nn.ParameterDict({"more": more}), {"*": P()})
        inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer = ParallelOptimizer(inner, registry)
        inner.add_param_group({"params": [("more", more)]})
        optimizer.backward(((1 + registry.global_rank) * more).sum() + model.weight.sum())
        optimizer.step()
        return more.detach()


def test_gradients_of_param_group_added_to_wrapped_optimizer_are_reduced(world: World) -> None:
    for value in world.run(2, group_added_to_the_wrapped_one):
        assert torch.equal(value, torch.full((3,), 1 - 0.1 * 1.5))


def test_wrapped_optimizer_can_be_stepped_after_wrapper_is_deleted() -> None:
    model = small()
    inner = adamw(model)
    optimizer = ParallelOptimizer(inner, alone())
    other = copy.copy(optimizer)
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match=REFUSED.format("AdamW")):
        inner.step()
    del other
    gc.collect()
    assert not inner._optimizer_step_pre_hooks
    assert not {"zero_grad", "load_state_dict", "add_param_group"} & vars(inner).keys()
    model(torch.ones(2, 4)).sum().backward()
    inner.step()
    inner.zero_grad()
    assert model.weight.grad is None


def test_optimizer_wrapped_twice_has_one_step_hook_that_raises() -> None:
    model = small()
    inner = adamw(model)
    first = ParallelOptimizer(inner, alone())
    second = ParallelOptimizer(inner, alone())
    assert len(inner._optimizer_step_pre_hooks) == 1
    del first
    gc.collect()
    window(second, model)
    with pytest.raises(RuntimeError, match=REFUSED.format("AdamW")):
        inner.step()
    second.step()


REPLACING: dict[str, dict[str, Any]] = {
    "master weights": {"precision": "bf16"},
    "some copies on the CPU": {"states": Offloaded(0.5)},
    "list": {"states": Offloaded(0.5)},
}


@pytest.mark.parametrize("how", REPLACING)
@pytest.mark.parametrize("deleted", [False, True])
def test_wrapping_again_raises_if_param_groups_hold_other_tensors_than_model(how: str, deleted: bool) -> None:
    """A second `ParallelOptimizer` would leave the model's parameters unchanged, without an error if some are replaced."""
    model, options = small(), REPLACING[how]
    if "precision" in options:
        precision_of("bf16").prepare(model)
    inner: Any = [adamw(model), adamw(small(1))] if how == "list" else adamw(model)
    first = ParallelOptimizer(inner, alone(), **options)
    if deleted:
        del first
        gc.collect()
    with pytest.raises(ValueError, match=r"wrapped this AdamW before, .*: create the torch optimizer again"):
        ParallelOptimizer(inner, alone(), **options)
    ParallelOptimizer(adamw(model), alone(), **options)


def wrapped_again_after_unfreezing() -> list[str]:
    """Return the errors of a second wrapper, while an undeclared parameter is frozen, and after it was unfrozen."""
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        model = nn.Linear(4, 3)
        annotate(model.bias, P(), "bias")
        model.weight.requires_grad_(False)
        inner, found = adamw(model), []
        ParallelOptimizer(inner, registry)
        ParallelOptimizer(inner, registry)
        declare(model, {"*": P()})
        model.weight.requires_grad_(True)
        for make in (inner, adamw(model)):
            try:
                ParallelOptimizer(make, registry)
                found.append("")
            except ValueError as error:
                found.append(str(error))
        return found


def test_wrapping_again_raises_if_left_out_parameter_was_unfrozen(world: World) -> None:
    for again, new in world.run(2, wrapped_again_after_unfreezing):
        assert "and removed weight from its param groups, frozen then and trained now" in again
        assert new == ""


def test_copies_of_wrapped_optimizer_can_be_stepped() -> None:
    model = small()
    inner = adamw(model)
    optimizer = ParallelOptimizer(inner, alone())
    window(optimizer, model)
    optimizer.step()
    for copied in (copy.deepcopy(inner), copy.copy(inner), pickle.loads(pickle.dumps(inner))):
        copied.step()
        copied.zero_grad()
    for whole in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(RuntimeError, match=REFUSED.format("AdamW")):
            whole.optimizer.step()
    with pytest.raises(RuntimeError, match=REFUSED.format("AdamW")):
        inner.step()


def test_torch_optimizer_can_be_stepped_after_failed_wrapping() -> None:
    model = small()
    inner = adamw(model)
    with pytest.raises(ValueError, match="max_norm"):
        ParallelOptimizer(inner, alone(), max_norm=-1.0)
    model(torch.ones(2, 4)).sum().backward()
    inner.step()


def sharded_states_by_torch() -> bool:
    with ProcessGroupRegistry(Topology(data=2)) as registry:
        model = small()
        optimizer = ParallelOptimizer(adamw(model), registry, states=Sharded("data"))
        return bool(TorchStates(optimizer).state_dict()["state"])


def test_torch_states_adapter_with_zero1_returns_nonempty_state(world: World) -> None:
    assert world.run(2, sharded_states_by_torch) == [True, True]


def test_eval_of_wrapped_optimizer_updates_model_weights() -> None:
    class Averaging(torch.optim.SGD):
        elementwise = True

        def train(self) -> None:
            pass

        def eval(self) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        param.fill_(2.0)

    model = small()
    precision_of("bf16").prepare(model)
    inner = Averaging(model.named_parameters(), lr=0.1)
    optimizer = ParallelOptimizer(inner, alone(), precision="bf16")
    inner.eval()
    assert bool((model.weight == 2.0).all())
    assert optimizer.param_groups is inner.param_groups
