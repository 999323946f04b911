"""`ParallelOptimizer` with several inner optimizers: one norm, one step decision and one state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from meshstep.optim import (
    HalfStates,
    Offloaded,
    ParallelOptimizer,
    Sharded,
    StatePlacement,
    TorchStates,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.parallel import P, ProcessGroupRegistry, Topology, declare, shard
from precision_modes import MODES
from probes import HostReadError, NoHostReads, no_host_reads
from scenarios import SCENARIOS, batch, build, dense_loss, full_tensors
from torch import Tensor, nn
from world import World

STEPS, BROKEN, SAVED, MAX_NORM = 6, 2, 3, 0.4  # step BROKEN overflows; at SAVED, a new optimizer loads
SCENARIO = SCENARIOS["data x tensor"]
PLACEMENTS: dict[str, tuple[StatePlacement, ...]] = {
    "whole": (),
    "zero1": (Sharded("data"),),
    "zero2": (Sharded("data", gradients=True),),
    "offloaded": (Sharded("data"), Offloaded(0.5)),
    "half states": (HalfStates(),),
}
Make = Callable[[list[Tensor], list[Tensor]], Any]


def adamw(params: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


def two(matrices: list[Tensor], others: list[Tensor]) -> list[torch.optim.Optimizer]:
    return [adamw(matrices, 0.02), adamw(others, 0.005)]


def one(matrices: list[Tensor], others: list[Tensor]) -> torch.optim.Optimizer:
    groups = [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.005}]
    return torch.optim.AdamW(groups, fused=True)


def of_two_classes(matrices: list[Tensor], others: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Return a fused AdamW for the matrices, and for the others an SGD, whose step synchronizes with the host."""
    return [adamw(matrices, 0.02), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


def halves(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    params = list(model.parameters())
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def run(
    make: Make, mode: str, where: str, directory: Path | None, start: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """Run the steps from ``start`` to `STEPS`. If ``directory`` is given, save a checkpoint before step `SAVED`. If
    ``start`` > 0, first load the checkpoint.

    Return the norm and the skip flag of each step, and the final full parameters.
    """
    with ProcessGroupRegistry(SCENARIO.topology) as registry:
        model = build(SCENARIO, registry, dtype)
        assert model is not None
        MODES[mode].prepare(model, registry)
        options: dict[str, Any] = {"max_norm": MAX_NORM, "precision": MODES[mode], "states": PLACEMENTS[where]}
        optimizer = ParallelOptimizer(make(*halves(model)), registry, **options)
        if start:
            assert directory is not None
            load_checkpoint(directory, model, optimizer)
        norms, skipped = [], []
        for step in range(start, STEPS):
            if step == SAVED and not start and directory is not None:
                save_checkpoint(directory, model, optimizer)
            optimizer.zero_grad()
            loss = model(shard(batch(step), P("data"), registry))
            broken = step == BROKEN and registry.coordinate["data"] == 1
            optimizer.backward(loss * torch.inf if broken else loss)
            stats = optimizer.step()
            assert stats is not None
            norms.append(float(stats.total_norm))
            skipped.append(bool(stats.found_inf))
        return norms, skipped, full_tensors(SCENARIO, model, registry, gradients=False)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("where", PLACEMENTS)
def test_two_optimizers_match_one_optimizer_with_two_param_groups_bitwise(
    where: str, world: World, tmp_path: Path
) -> None:
    modes = list(MODES) if where == "whole" else ["fp32", "bf16"] if where == "half states" else ["fp16", "bf16"]
    several = world.run_each(run, [(4, (two, mode, where, tmp_path / mode)) for mode in modes])
    single = world.run_each(run, [(4, (one, mode, where, None)) for mode in modes])
    resumed = world.run_each(run, [(4, (two, mode, where, tmp_path / mode, SAVED)) for mode in modes])
    for mode, *results in zip(modes, several, single, resumed, strict=True):
        for mine, its, again in zip(*results, strict=True):
            assert mine[1] == its[1] == [*its[1][:SAVED], *again[1]], mode
            assert mine[1][BROKEN], mode
            assert str(mine[0]) == str(its[0]), mode
            assert str(mine[0][SAVED:]) == str(again[0]), mode
            for name in its[2]:
                assert torch.equal(mine[2][name], its[2][name]), (mode, name)
                assert torch.equal(mine[2][name], again[2][name]), (mode, name, "saved")


def dense(make: Make) -> tuple[list[float], dict[str, Tensor]]:
    """Train in float64 with separate optimizers, clipped by the global norm. No optimizer steps in step `BROKEN`.

    Return the norm of each step and the final parameters.
    """
    with ProcessGroupRegistry(Topology(roles=None, data=1, tensor=1)) as registry:
        model = build(SCENARIO, registry, torch.float64)
        assert model is not None
        weights = {
            name: nn.Parameter(w) for name, w in full_tensors(SCENARIO, model, registry, gradients=False).items()
        }
    optimizers = make([w for w in weights.values() if w.dim() == 2], [w for w in weights.values() if w.dim() != 2])
    norms = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        dense_loss(SCENARIO, dict(weights), batch(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)))
        for optimizer in optimizers if step != BROKEN else ():
            optimizer.step()
    return norms, {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("make", [two, of_two_classes])
def test_two_optimizers_match_dense_steps_clipped_by_global_norm(make: Make, world: World, tmp_path: Path) -> None:
    norms, weights = dense(make)
    assert any(norm > MAX_NORM for norm in norms), "some steps must be clipped"
    cases = [
        (4, (make, "fp32", where, tmp_path / where, start, torch.float64))
        for where in ("whole", "zero1")
        for start in (0, SAVED)  # each second run loads the checkpoint of the run before it
    ]
    for (_, case), by_rank in zip(cases, world.run_each(run, cases), strict=True):
        start = case[4]
        for found, skipped, full in by_rank:
            assert skipped == [step == BROKEN for step in range(start, STEPS)]
            taken = [step for step in range(start, STEPS) if step != BROKEN]
            assert [found[step - start] for step in taken] == pytest.approx([norms[step] for step in taken], rel=1e-12)
            for name, weight in weights.items():
                torch.testing.assert_close(full[name], weight, rtol=1e-9, atol=1e-12)


# Small models, mostly in one process ------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    declare(model, {"*": P()})
    return model


def optimizer_of(make: Make, model: nn.Module, **options: Any) -> ParallelOptimizer:
    return ParallelOptimizer(make(*halves(model)), ProcessGroupRegistry(Topology()), **options)


def step(model: nn.Module, optimizer: ParallelOptimizer, seed: int) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean())
    optimizer.step()


def test_step_of_several_optimizers_synchronizes_with_host_only_if_one_requires_it() -> None:
    fused, mixed = small(), small()
    on_device, on_host = optimizer_of(two, fused), optimizer_of(of_two_classes, mixed)
    for seed in range(2):
        step(fused, on_device, seed)
        step(mixed, on_host, seed)
    with no_host_reads():
        step(fused, on_device, 2)
    with pytest.raises(HostReadError), NoHostReads():  # type: ignore[no-untyped-call]
        step(mixed, on_host, 2)


def test_schedules_on_all_or_one_of_several_optimizers_change_their_groups() -> None:
    model = small()
    matrices, others = two(*halves(model))
    optimizer = ParallelOptimizer([matrices, others], ProcessGroupRegistry(Topology()))
    of_all = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    of_one = torch.optim.lr_scheduler.LambdaLR(others, lambda t: 0.1**t)
    step(model, optimizer, 0)
    of_all.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.0025]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch replaces the param groups
    of_one.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.0005])


def test_copied_and_loaded_combined_optimizers_continue_identically() -> None:
    model = small()
    optimizer = optimizer_of(of_two_classes, model, max_norm=0.1)
    for seed in range(2):
        step(model, optimizer, seed)
    model2, optimizer2 = copy.deepcopy((model, optimizer))
    model3 = copy.deepcopy(model)
    declare(model3, {"*": P()})
    optimizer3 = optimizer_of(of_two_classes, model3, max_norm=0.1)
    optimizer3.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model4 = copy.deepcopy(model)
    declare(model4, {"*": P()})
    optimizer4 = optimizer_of(of_two_classes, model4, max_norm=0.1)
    TorchStates(optimizer4).load_state_dict(copy.deepcopy(TorchStates(optimizer).state_dict()))
    for each, of in ((model, optimizer), (model2, optimizer2), (model3, optimizer3), (model4, optimizer4)):
        for seed in range(2, 4):
            step(each, of, seed)
    for other in (model2, model3, model4):
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
    assert "AdamW" in repr(optimizer)
    assert "SGD" in repr(optimizer)


def test_group_added_to_combined_optimizer_requires_optimizer_index() -> None:
    model, more = small(), nn.Parameter(torch.ones(3))
    optimizer = optimizer_of(of_two_classes, model)
    with pytest.raises(ValueError, match=r"set it to the position \(0 to 1\) of the group's optimizer in the list"):
        optimizer.add_param_group({"params": [more]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [more], "optimizer": 1})
    assert optimizer.param_groups[2]["momentum"] == 0.9
    optimizer.backward(more.sum())
    optimizer.step()
    torch.testing.assert_close(more.detach(), torch.full((3,), 0.9))
    assert "momentum_buffer" in optimizer.state[more]


def test_invalid_lists_of_optimizers_are_rejected() -> None:
    model, registry = small(), ProcessGroupRegistry(Topology())
    matrices, others = halves(model)

    def refused(optimizers: Sequence[Any], error: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            ParallelOptimizer(optimizers, registry, **options)

    refused([], ValueError, "empty")
    refused([adamw(matrices, 0.1), model], TypeError, "optimizer 1 of the list is a Sequential")
    refused(
        [adamw(matrices, 0.1), adamw([*others, matrices[0]], 0.1)], ValueError, r"\(8, 6\) is in optimizers 0 and 1"
    )
    stepped = optimizer_of(two, small())
    refused([adamw(matrices, 0.1), stepped], TypeError, "optimizer 1 of the list is a ParallelOptimizer")
    refused([torch.optim.LBFGS(matrices), adamw(others, 0.1)], TypeError, "LBFGS.step requires a closure")
    first, second = two(matrices, others)
    states = [first.state_dict(), second.state_dict()]
    refused([first, second], ValueError, "max_norm", max_norm=-1.0)
    assert [first.state_dict(), second.state_dict()] == states
    plain = ParallelOptimizer(adamw(list(small().parameters()), 0.1), registry)
    mine = optimizer_of(two, small())
    with pytest.raises(ValueError, match=r"with the indices \[None\]"):
        mine.load_state_dict(plain.state_dict())


def whole_tensor_ones(make: Make) -> str:
    with ProcessGroupRegistry(Topology(roles=None, data=1, tensor=2)) as registry:
        model = build(SCENARIO, registry, torch.float32)
        assert model is not None
        try:
            ParallelOptimizer(make(*halves(model)), registry)
        except ValueError as error:
            return str(error)
        return ""


def whole_for_matrices(matrices: list[Tensor], others: list[Tensor]) -> Any:
    return [torch.optim.Adafactor(matrices), adamw(others, 0.1)]


def whole_for_positions(matrices: list[Tensor], others: list[Tensor]) -> Any:
    """Use Adafactor for two replicated vectors of 8 elements, and AdamW for all other parameters."""
    copied = [p for p in others if p.numel() == 8 and p is not others[2]][:2]
    rest = [p for p in (*matrices, *others) if all(p is not c for c in copied)]
    return [torch.optim.Adafactor(copied), adamw(rest, 0.1)]


def test_torch_adafactor_is_accepted_for_replicated_parameters_only(world: World) -> None:
    split, copied = world.run_each(whole_tensor_ones, [(2, (whole_for_matrices,)), (2, (whole_for_positions,))])
    assert all("Adafactor is not known to be" in message for message in split)
    assert copied == ["", ""]


def test_states_created_after_loading_are_in_combined_optimizer_state_dict() -> None:
    with ProcessGroupRegistry(Topology()) as registry:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
        optimizer = ParallelOptimizer([torch.optim.NAdam([param], lr=0.1) for param in params], registry)
        inner = optimizer.optimizer
        inner.load_state_dict(inner.state_dict())  # before the first step: without states
        optimizer.backward(params[0].sum() + params[1].sum())
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == len(inner.state_dict()["state"]) == 2
        assert inner.state.keys() == {*params}
