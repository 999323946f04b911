"""Steps in the precision modes: dtypes, collectives, host synchronization, and twenty steps compared with one process."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from meshstep.amp import Bf16, NaiveFp16, precision_of
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import ProcessGroupRegistry, Topology
from optimizers import stepped
from precision_modes import MODES, differences, make, snapshot, train_step
from precision_table import BF16, F16, F32, TABLE, Net, expected_dtypes, floating
from precision_table import batch as images
from probes import HostReadError, collectives, no_host_reads
from scenarios import SCENARIOS, Scenario, batch, build, dense_1d, full_tensors
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

ONE_PROCESS = Scenario((("tensor", 1),), "1d", dense_1d)


# Dtypes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", TABLE)
def test_gradients_states_and_masters_have_documented_dtypes_in_every_precision(mode: str) -> None:
    precision, row = TABLE[mode]
    torch.manual_seed(1)
    model = precision.prepare(Net())
    own = [param.dtype for param in model.parameters()]
    main = [F32 if row.masters else dtype for dtype in own]
    held = own if precision.split_masters else main  # with split masters, float32 weights exist only during the step
    optimizer = ParallelOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        ProcessGroupRegistry(Topology()),
        max_norm=1.0,
        precision=precision,
    )
    for _ in range(2):
        optimizer.zero_grad()
        x, tokens = images()
        optimizer.backward(precision.prepare_criterion(F.cross_entropy)(model(x, tokens)["logits"], tokens))
        assert [param.grad.dtype for param in model.parameters() if param.grad is not None] == main
        stats = optimizer.step()
    assert stats is not None
    assert [param.dtype for param in stepped(optimizer)] == held
    assert [param.dtype for param in model.parameters()] == own
    assert floating(model.state_dict()) == expected_dtypes(row, model)
    for param, dtype in zip(stepped(optimizer), main, strict=True):
        assert {key: optimizer.state[param][key].dtype for key in ("exp_avg", "exp_avg_sq")} == {
            "exp_avg": dtype,
            "exp_avg_sq": dtype,
        }
    saved = optimizer.state_dict()["meshstep"]
    halves = [index for index, dtype in enumerate(own) if dtype in (F16, BF16)]
    masters = saved["weights"].get("masters", {})
    assert {index: value.dtype for index, value in masters.items()} == dict.fromkeys(halves if row.masters else (), F32)
    assert (stats.total_norm.dtype, stats.found_inf.dtype) == (torch.float64, F32)
    assert (None if stats.loss_scale is None else (stats.loss_scale.dtype, float(stats.loss_scale))) == (
        None if row.scale is None else (F32, row.scale)
    )


# Collectives and host synchronization ---------------------------------------------------------------------------------


def cost(name: str, mode: str, kind: str, norm_type: float, watch: bool = True) -> tuple[Counter[str], bool]:
    """Return the collectives of a step, and whether any step synchronized with the host; one of 20 steps is skipped.

    A backward that synchronizes raises.
    """
    scenario = SCENARIOS[name]
    with ProcessGroupRegistry(scenario.topology) as registry:
        model, optimizer = make(scenario, registry, MODES[mode], kind, max_norm=0.3, norm_type=norm_type)
        counts = []
        for step in range(20):  # more steps than the delay of the skip monitor
            optimizer.zero_grad()
            loss = model(batch(step))
            # The first step runs additional checks; steps 2 and 16 compare master weights with the model.
            compares = step in (1, 15) and MODES[mode].masters
            with no_host_reads() if step and watch and not compares else nullcontext():
                optimizer.backward(loss)
                if step == 3:
                    for param in model.parameters():
                        assert param.grad is not None
                        param.grad.fill_(torch.nan)
                try:
                    with collectives() as seen:
                        optimizer.step()
                except HostReadError:
                    return seen, True
                optimizer.zero_grad()
            counts.append(seen)
        assert counts[1:] == counts[1:2] * 19
        assert optimizer.skipped_steps == 1
        return counts[1], False


@pytest.mark.parametrize("mode", ["fp16", "fp16_naive", "bf16", "O2", "O1", "O3", "bf16 stochastic"])
def test_step_in_mixed_precision_needs_one_collective_and_no_host_synchronization(world: World, mode: str) -> None:
    # O3 has AdamW only: see test_fused_sgd_steps_all_elements_of_half_precision_parameters.
    other = "adamw" if mode == "O3" else "sgd"
    for kind, norm_type, expected in (("adamw", 2.0, "all_reduce"), (other, float("inf"), "all_gather_single")):
        assert world.run(2, cost, "tensor", mode, kind, norm_type) == [({expected: 1}, False)] * 2


@pytest.mark.parametrize("mode", ["fp16_naive", "bf16"])
def test_half_precision_step_with_partial_gradients_needs_three_all_reduces(world: World, mode: str) -> None:
    name = "data x sequence parallel"  # over data, over data x tensor (partial gradients), and for the norm
    assert world.run(4, cost, name, mode, "adamw", 2.0, False) == [({"all_reduce": 3}, False)] * 4


def test_step_of_unfused_optimizer_is_detected_as_host_synchronization(world: World) -> None:
    assert [read for _, read in world.run(2, cost, "tensor", "O2", "adamw, not fused", 2.0)] == [True, True]


# Twenty steps ---------------------------------------------------------------------------------------------------------

# Tolerances after twenty steps: of losses and norms relative to their values, of weights relative to the largest element
# of their tensor. The steps change the tensors of the linear layers by 17% to 100% of their norm.
TOLERANCE = {
    "fp32": (1e-6, 1e-6, 2e-6),
    "O0": (1e-6, 1e-6, 2e-6),
    "fp16": (5e-5, 5e-4, 1e-3),
    "O1": (5e-5, 5e-4, 1e-3),
    "fp16_naive": (1e-4, 5e-4, 3e-3),
    "O2": (1e-4, 5e-4, 3e-3),
    "O3": (1e-4, 5e-4, 5e-3),
    "bf16": (5e-4, 5e-3, 2e-2),
    "bf16 stochastic": (2e-3, 2e-2, 8e-2),  # the sharded run draws other rounding noise than the single process
}


def twenty(scenario: Scenario, mode: str) -> tuple[list[float], list[float], dict[str, Tensor], bytes]:
    """Return losses, norms, full weights at the end, and the bytes of parameters replicated over tensor."""
    with ProcessGroupRegistry(scenario.topology) as registry:
        model, optimizer = make(scenario, registry, MODES[mode], "sgd", max_norm=0.4)
        losses, norms = [], []
        for step in range(20):
            losses.append(train_step(model, optimizer, batch(step)))
            norms.append(float(optimizer.grad_norm if optimizer.grad_norm is not None else torch.nan))
        assert optimizer.skipped_steps == 0
        replicated = torch.cat([model.get_parameter(f"norm.{name}").detach() for name in ("weight", "bias")])
        weights = full_tensors(scenario, model, registry, gradients=False)
        return losses, norms, weights, replicated.float().numpy().tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_twenty_steps_match_single_process_in_every_precision(world: World, mode: str) -> None:
    losses, norms, weights, _ = twenty(ONE_PROCESS, mode)
    runs = world.run(2, twenty, SCENARIOS["tensor"], mode)
    of_loss, of_norm, of_weight = TOLERANCE[mode]
    assert len({run[3] for run in runs}) == 1
    for run in runs:
        assert run[0] == pytest.approx(losses, rel=of_loss)
        assert run[1] == pytest.approx(norms, rel=of_norm)
        for name, expected in weights.items():
            error = (run[2][name].double() - expected.double()).abs().max() / expected.double().abs().max()
            assert error <= of_weight, f"{name}: {error:.1e}"


# Backward without the optimizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "fp16", "fp16_naive", "bf16", "O3"])
def test_backward_of_scale_loss_matches_optimizer_backward(mode: str) -> None:
    with ProcessGroupRegistry(Topology(tensor=1)) as registry:
        ends = []
        for by_hand in (True, False):
            model, optimizer = make(ONE_PROCESS, registry, MODES[mode], max_norm=0.3)
            for step in range(3):
                optimizer.zero_grad()
                loss = model(batch(step))
                if by_hand:
                    optimizer.scale_loss(loss).backward()
                else:
                    optimizer.backward(loss)
                optimizer.step()
            ends.append(snapshot(model, optimizer))
        assert differences(*ends) == []


@pytest.mark.parametrize("fused", [True, False])
def test_scaled_fp16_loss_does_not_overflow(fused: bool) -> None:
    """The scaled loss is in float32. The gradient of the float16 loss is the scale, and 2^16 overflows in float16, so the
    first step is skipped and the scale halves once."""
    model = nn.Linear(3, 1, bias=False, dtype=F16)
    nn.init.constant_(model.weight, 0.5)
    optimizer = ParallelOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, fused=fused),
        ProcessGroupRegistry(Topology()),
        precision=NaiveFp16(init_scale=2.0**16, hysteresis=1),
    )
    for skipped in (1, 1):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, dtype=F16)).mean() * 8 * 2.0**-10
        assert loss.dtype == F16
        assert optimizer.scale_loss(loss).dtype == F32
        assert bool(optimizer.scale_loss(loss).isfinite())
        optimizer.backward(loss)
        optimizer.step()
        assert optimizer.skipped_steps == skipped
    assert optimizer.loss_scale is not None
    assert float(optimizer.loss_scale.scale) == 2.0**15
    assert torch.equal(stepped(optimizer)[0].detach(), torch.full((1, 3), 0.5 - 0.5 * 2.0**-7))


# Half-precision parameters without master weights ---------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mode", ["O3", "fp32"])
def test_fused_sgd_steps_all_elements_of_half_precision_parameters(mode: str, momentum: float) -> None:
    """On a CPU, torch 2.12 and 2.13 lose the updates of all except the last few elements (pytorch issue 191763)."""
    dtype = BF16 if mode == "fp32" else F16  # a bfloat16 model that was not prepared
    weight, twin = nn.Parameter(torch.ones(67, dtype=dtype)), nn.Parameter(torch.ones(67, dtype=dtype))
    optimizer = ParallelOptimizer(
        torch.optim.SGD([weight], lr=0.25, momentum=momentum, fused=True),
        ProcessGroupRegistry(Topology()),
        precision=MODES[mode],
    )
    reference = torch.optim.SGD([twin], lr=0.25, momentum=momentum)
    for value in (1.0, torch.inf, 0.5):
        optimizer.zero_grad()
        optimizer.backward((weight * value).float().sum())
        optimizer.step()
        if value != torch.inf:
            twin.grad = torch.full_like(twin, value)
            reference.step()
    assert torch.equal(weight, twin)
    assert optimizer.skipped_steps == 1
    assert optimizer.param_groups[0]["fused"] is True


# Stochastic rounding, and added param groups --------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
def test_bf16_keeps_small_updates_by_stochastic_rounding_or_float32_masters(stochastic: bool, fused: bool) -> None:
    weight = nn.Parameter(torch.ones(20000, dtype=BF16))
    optimizer = ParallelOptimizer(
        torch.optim.SGD([weight], lr=1e-3, fused=fused),
        ProcessGroupRegistry(Topology()),
        precision=Bf16(stochastic_rounding=stochastic),
        max_norm=0.5 * 20000**0.5,
    )
    for step in range(21):  # each moves weights by 5e-4, 1/8 unit in the last place; one is skipped
        weight.grad = torch.ones(20000, dtype=F32 if not stochastic else BF16)
        if step == 10:
            weight.grad[7] = torch.inf
        optimizer.step()
    assert optimizer.skipped_steps == 1
    spread = set(weight.detach().float().tolist())
    mean = float(weight.detach().double().mean())
    if stochastic:
        assert mean == pytest.approx(1 - 20 * 5e-4, abs=3e-4)
        assert len(spread) > 3
    else:
        assert spread == {float(torch.tensor(1 - 20 * 5e-4).to(BF16))}
        torch.testing.assert_close(stepped(optimizer)[0].detach(), torch.full((20000,), 1 - 20 * 5e-4))


@pytest.mark.parametrize("mode", ["fp32", "fp16", "fp16_naive", "bf16", "bf16 stochastic", "O3"])
def test_added_param_group_is_stepped_like_initial_group(mode: str) -> None:
    with ProcessGroupRegistry(Topology(tensor=1)) as registry:
        ends = []
        for later in (True, False):
            model = build(ONE_PROCESS, registry, F32)
            assert model is not None
            MODES[mode].prepare(model, registry)
            names = list(dict(model.named_parameters()))
            groups = [{"params": [model.get_parameter(name) for name in part]} for part in (names[:-2], names[-2:])]
            inner = torch.optim.SGD(groups[:1] if later else groups, lr=0.1, momentum=0.9, fused=True)
            optimizer = ParallelOptimizer(inner, registry, precision=MODES[mode], max_norm=0.3)
            if later:
                optimizer.add_param_group(groups[1])
            for step in range(3):
                train_step(model, optimizer, batch(step))
            ends.append(snapshot(model, optimizer))
        assert differences(*ends) == []


@pytest.mark.parametrize(
    ("mode", "advice", "precision"),
    [
        ("bf16", "half-precision model, leave precision= out", "fp32"),
        ("fp16_naive", "half-precision model, give precision='fp16', which only scales the loss", "fp16"),
    ],
)
def test_float32_adapters_of_half_precision_model_train_with_the_advised_precision(
    mode: Any, advice: str, precision: Any
) -> None:
    """`prepare` was called, so that advice alone would not help; without the loss scale, float16 gradients underflow."""
    base, adapter = nn.Linear(4, 4), nn.Linear(4, 4)
    precision_of(mode).prepare(base).requires_grad_(False)
    registry = ProcessGroupRegistry(Topology())
    with pytest.raises(ValueError, match=advice):
        ParallelOptimizer(torch.optim.SGD(adapter.parameters(), lr=0.5), registry, precision=mode)
    optimizer = ParallelOptimizer(torch.optim.SGD(adapter.parameters(), lr=0.5), registry, precision=precision)
    expected = adapter.weight.detach().clone() - 0.5
    optimizer.backward(
        adapter(torch.ones(1, 4)).sum() + base(adapter(torch.ones(1, 4)).to(base.weight.dtype)).sum() * 0
    )
    optimizer.step()
    assert torch.equal(adapter.weight, expected)
    assert (optimizer.loss_scale is None) == (precision == "fp32")
