"""Lion: its formula, and a step that reads skip flag and factor on the device."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from loops import using
from meshstep.amp import Bf16
from meshstep.optim import Lion, ParallelOptimizer
from meshstep.optim.step import c_engine
from meshstep.optim.step.update import steps_on_device
from meshstep.parallel import ProcessGroupRegistry, Topology
from planted import LAYOUTS
from probes import no_host_reads
from torch import Tensor, nn
from whole_runs import STATES, alone, copies_differ, largest_error
from whole_services import beyond_sgd, changed_by_overflow, each_trained, run_to, without_host_reads
from world import World

OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.03},
    {"lr": 0.03, "betas": (0.5, 0.8), "weight_decay": 0.3},
    {"lr": torch.tensor(0.03), "weight_decay": 0.1},
]


def lion(params: Any, **options: Any) -> Lion:
    return Lion(params, **{"lr": 0.03, "weight_decay": 0.2, **options})


def gradients(step: int, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def expected(options: dict[str, Any], weight: Tensor, grads: list[Tensor]) -> Tensor:
    """Return the weight after one step per gradient, by algorithm 2 of arXiv:2302.06675."""
    lr, (b1, b2), decay = float(options["lr"]), options.get("betas", (0.9, 0.99)), options.get("weight_decay", 0.0)
    momentum = torch.zeros_like(weight)
    for grad in grads:
        update = torch.sign(b1 * momentum + (1 - b1) * grad)
        weight = weight - lr * (update + decay * weight)
        momentum = b2 * momentum + (1 - b2) * grad
    return weight


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lion_matches_published_formula(options: dict[str, Any], dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(7, 3), (), (5,), (0, 2)]
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    before, grads = (
        [param.detach().double().clone() for param in params],
        [gradients(step, shapes) for step in range(6)],
    )
    optimizer = Lion(params, **options)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
    for index, param in enumerate(params):
        want = expected(options, before[index], [of_step[index].to(dtype).double() for of_step in grads])
        torch.testing.assert_close(
            param.detach().double(), want, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_skipped_lion_step_changes_no_values_and_needs_no_host_synchronization(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0, 0.5])
    param, late = nn.Parameter(values.to(dtype)), nn.Parameter(values.to(dtype))
    optimizer: Any = lion([param, late])
    param.grad = torch.tensor([0.0, -0.0, -0.0, 1.0, -2.0, 0.0]).to(dtype)
    optimizer.step()
    optimizer.state[param]["exp_avg"][:4] = torch.tensor([-0.0, 0.0, -1.0, 1.0])
    param.data[:4] = torch.tensor([-0.0, 0.0, -0.0, -0.0])
    tensors = [param, late, optimizer.state[param]["exp_avg"]]
    before = [tensor.detach().clone() for tensor in tensors]
    for bad in (torch.nan, torch.inf, -torch.inf, 1.0):
        param.grad, late.grad = torch.full_like(param, bad), torch.full_like(param, bad)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.full((), 0.5)
        with no_host_reads():
            optimizer.step()
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor, old)
            assert torch.equal(tensor.signbit(), old.signbit())
        assert not optimizer.state[late]["exp_avg"].any()
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not torch.equal(param, before[0])


def test_lion_divides_gradients_by_grad_scale_in_update() -> None:
    found = []
    for factor in (1.0, 0.25):
        param = nn.Parameter(torch.linspace(-1, 1, 9))
        optimizer: Any = lion([param])
        for step in range(4):
            param.grad = gradients(step, [(9,)])[0].float() * (1 if factor == 1 else 4)
            optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(1 / factor)
            optimizer.step()
        found.append([param.detach(), optimizer.state[param]["exp_avg"]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_lion_updates_half_precision_weights_in_float32() -> None:
    weight = torch.linspace(-1, 1, 50).bfloat16()
    param, exact = nn.Parameter(weight.clone()), nn.Parameter(weight.float())
    for own in (param, exact):
        own.grad = torch.linspace(1, -2, 50).bfloat16().to(own.dtype)
        lion([own], lr=0.01).step()
    assert torch.equal(param, exact.bfloat16())


def test_lion_rejects_invalid_arguments() -> None:
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="lr and weight_decay must be >= 0"):
            lion([nn.Parameter(torch.ones(2))], **options)


def test_lion_resumes_bitwise_from_state_dict() -> None:
    param = nn.Parameter(torch.ones(6))
    optimizer = lion([param])
    param.grad = torch.linspace(-1, 1, 6)
    optimizer.step()
    other = nn.Parameter(param.detach().clone())
    loaded = lion([other])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.grad = param.grad = torch.linspace(1, -2, 6)
    optimizer.step()
    loaded.step()
    assert torch.equal(param, other)


# In a ParallelOptimizer -------------------------------------------------------------------------------------------------

CASES = [(layout, "whole") for layout in ("tensor", "grid", "pipe, tied", "data x tensor")]
CASES += [("data x tensor", "ZeRO-2"), ("tensor", "offload")]


def test_lion_matches_dense_update_on_several_layouts_and_state_placements(world: World) -> None:
    calls = [
        (LAYOUTS[layout].topology.world_size, (LAYOUTS[layout], [lion], STATES[states], 6)) for layout, states in CASES
    ]
    for (layout, states), by_rank in zip(CASES, world.run_each(each_trained, calls), strict=True):
        own = [made for (made,) in by_rank]
        assert largest_error(own, alone(LAYOUTS[layout], lion, 6)) <= 1e-12, f"{layout}, {states}"
        assert copies_differ(own) == [], f"{layout}, {states}"


def test_lion_needs_no_extra_collective_or_host_synchronization_and_skips_overflow(world: World) -> None:
    layout, makes = LAYOUTS["data x tensor"], [lion]
    assert world.run(4, beyond_sgd, layout, makes, {}) == [[{}]] * 4
    world.run(4, without_host_reads, layout, makes, {})
    for dtype in (torch.float64, torch.float32):
        assert world.run(4, changed_by_overflow, layout, makes, dtype, STATES["ZeRO-2"]) == [[[]]] * 4


def test_lion_checkpoint_with_zero2_loads_with_replicated_states(world: World, tmp_path: Path) -> None:
    layout, make = LAYOUTS["data x tensor"], partial(lion)
    world.run(4, run_to, layout, make, tmp_path, range(3), False, STATES["ZeRO-2"])
    resumed = world.run(4, run_to, layout, make, tmp_path, range(3, 6), True, {})
    assert largest_error(resumed, alone(layout, make, 6)) <= 1e-12


@pytest.mark.parametrize("precision", [Bf16(), Bf16(split_masters=True)])
def test_clipped_lion_step_with_masters_needs_no_host_synchronization(precision: Bf16) -> None:
    model, registry = nn.Linear(4, 3), ProcessGroupRegistry(Topology())
    precision.prepare(model, registry)
    optimizer = ParallelOptimizer(lion(model.parameters()), registry, max_norm=0.1, precision=precision)
    assert steps_on_device(optimizer.optimizer)
    for step in range(4):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum())
        if step < 2:
            optimizer.step()
        else:
            with no_host_reads():
                optimizer.step()
        assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "masters": {"precision": Bf16()},
    "split masters": {"precision": Bf16(split_masters=True)},
    "in float64": {"dtype": torch.float64},  # no parameter is stepped by the loops
}


def stepped(options: dict[str, Any], dtype: torch.dtype = torch.float32, **other: Any) -> list[Tensor]:
    """Return weights, masters and momenta after six clipped steps, of which the device skips one."""
    torch.manual_seed(5)
    model, registry = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 1)).to(dtype), ProcessGroupRegistry(Topology())
    if "precision" in other:
        other["precision"].prepare(model, registry)
    optimizer = ParallelOptimizer(Lion(model.parameters(), **options), registry, max_norm=0.3, **other)
    dtype = next(model.parameters()).dtype
    for step in range(6):
        optimizer.zero_grad()
        x = gradients(step, [(8, 40)])[0].to(dtype)
        optimizer.backward(model(x).double().square().sum() * (torch.nan if step == 3 else 1.0))
        if step == 4:
            model[1].bias.grad = None
        assert float(optimizer.step().clip_coef) < 1 or step == 3
    states = [optimizer.state[row.tensor]["exp_avg"] for row in optimizer.stepped_tensors()]
    return [*model.parameters(), *(row.tensor for row in optimizer.stepped_tensors()), *states]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_lion_steps_by_compiled_loops_have_the_bits_of_torch_operations(
    mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs measure the norm by the compiled loops, because torch's kernels round it differently."""
    calls, update = list[Any](), c_engine.update_by_loops

    def counted(*args: Any) -> None:
        calls.append(args)
        update(*args)

    monkeypatch.setattr(c_engine, "update_by_loops", counted)
    with using("auto"), monkeypatch.context() as without:
        without.delitem(c_engine.SUPPORTED_OPTIMIZERS, Lion)
        want = stepped(options, **MODES[mode])
    assert not calls
    with using("auto"):
        found = stepped(options, **MODES[mode])
    assert bool(calls) == (mode != "in float64" and not isinstance(options["lr"], Tensor))
    for one, other in zip(want, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert torch.equal(one.signbit(), other.signbit())


def test_loading_lion_state_of_another_shape_raises() -> None:
    """The loops would read memory beyond the momentum."""
    param = nn.Parameter(torch.ones(6))
    optimizer = ParallelOptimizer(lion([param]), ProcessGroupRegistry(Topology()))
    optimizer.backward(param.sum())
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ValueError, match="has shape \\(2,\\), but its parameter has shape \\(6,\\)"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lion_step_on_cuda_needs_no_synchronization_and_about_one_masked_fill_per_parameter(
    dtype: torch.dtype,
) -> None:
    """Up to three more masked fills are allowed. The tensors are fake CUDA tensors; `tests/gpu/test_gpu_capture.py` steps
    Lion on a GPU."""
    with fake_cuda() as logging:
        params = [nn.Parameter(torch.ones(6, 2, device="cuda", dtype=dtype)) for _ in range(40)]
        optimizer = ParallelOptimizer(lion(params), ProcessGroupRegistry(Topology()), max_norm=1.0)
        for _ in range(3):
            with optimizer.window():
                for param in params:
                    param.grad = torch.ones_like(param)
            with logging() as log:
                optimizer.step()
    assert log.waits == []
    assert not [transfer for transfer in log.transfers if "lion" in transfer]  # skip counts are copied after the step
    assert sum(name.startswith("aten.masked_fill_") for name in log.launches) <= len(params) + 3
    assert sum(name.startswith("aten._foreach") for name in log.launches) <= 14
