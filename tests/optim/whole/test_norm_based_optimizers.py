"""LAMB, LARS, StableAdamW, Adafactor and CAME on single processes and random layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import MAKES, OPTIONS
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import CAME, LAMB, LARS, Adafactor, Sharded, StableAdamW
from meshstep.parallel import P
from planted import LAYOUTS, Layout, Part
from properties import random_cases
from torch import Tensor, nn
from whole_runs import STATES, WHOLE_LAYOUTS, alone, copies_differ, largest_error
from whole_services import (
    beyond_sgd,
    changed_by_overflow,
    each_trained,
    in_mode,
    random_layouts,
    run_to,
    without_host_reads,
)
from whole_table import OPTIMIZERS
from world import World

EXACT = 1e-12
NAMES, EACH = list(MAKES), list(MAKES.values())
every_name = pytest.mark.parametrize("name", NAMES)

# Formulas -------------------------------------------------------------------------------------------------------------

SHAPES = {"matrix": (6, 10), "tall": (12, 4), "stack": (3, 4, 6), "kernel": (4, 2, 3, 3), "bias": (7,), "gain": ()}
OTHER_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "LAMB": [
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "always_adapt": True},
        {"bias_correction": False, "betas": (0.8, 0.99), "eps": 0.1},
    ],
    "LARS": [
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "always_adapt": True},
        {"momentum": 0.0},
        {"nesterov": True, "eps": 0.1},
    ],
    "StableAdamW": [{"betas": (0.5, 0.6)}, {"eps": 0.3, "weight_decay": 0.0}],
    "Adafactor": [{"beta2_decay": -0.3, "d": 2.0}, {"eps": (0.5, 10.0)}, {"lr": 1.5, "weight_decay": 0.0}],
    "CAME": [{"clip_threshold": 0.5}, {"eps": (0.1, 0.2)}, {"clip_threshold": 10.0, "weight_decay": 0.0}],
}


def side_by_side(
    one: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    other: Callable[[list[Tensor], list[Tensor]], None],
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, ...]] = tuple(SHAPES.values()),
) -> list[tuple[Tensor, Tensor]]:
    """Return parameters after ten steps of an optimizer, and of a function of parameters and gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    plain = [param.detach().clone() for param in params]
    optimizer = one(params)
    for _ in range(10):
        grads = [torch.randn_like(param) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        other(plain, grads)
    return list(zip([param.detach() for param in params], plain, strict=True))


def error_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@every_name
def test_norm_based_optimizers_match_formula_for_several_options(name: str) -> None:
    kind, formula, usual = OPTIONS[name]
    found: list[list[Tensor]] = []
    for other in ({}, *OTHER_OPTIONS[name]):
        options = usual | other
        states: list[dict[str, Any]] = [{} for _ in SHAPES]
        step = partial(_step, formula, states, options)
        pairs = side_by_side(partial(kind, **options), step, torch.float64)
        assert error_of(pairs) <= EXACT, options
        found.append([one for one, _ in pairs])
    # Each option must have an effect.
    for index, one in enumerate(found):
        for other_one in found[:index]:
            assert error_of(zip(one, other_one, strict=True)) > 1e-6


def _step(
    formula: Callable[..., None],
    states: list[dict[str, Any]],
    options: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
) -> None:
    formula(params, grads, states, **options)


@pytest.mark.parametrize("options", [{}, {"lr": 0.5, "weight_decay": 0.3, "d": 2.0}, {"eps": (0.1, 0.5)}], ids=str)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, EXACT), (torch.float32, 1e-5)], ids=str)
def test_adafactor_matches_torch(options: dict[str, Any], dtype: torch.dtype, allowed: float) -> None:
    theirs: list[torch.optim.Optimizer] = []

    def step(params: list[Tensor], grads: list[Tensor]) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        if not theirs:
            theirs.append(torch.optim.Adafactor(params, **options))
        theirs[0].step()

    assert error_of(side_by_side(partial(Adafactor, **options), step, dtype)) <= allowed


def test_adafactor_continues_from_state_of_torch() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES.values()]
    theirs = [nn.Parameter(param.detach().clone()) for param in ours]
    one, other = Adafactor(ours), torch.optim.Adafactor(theirs)
    for step in range(6):
        for param, same in zip(ours, theirs, strict=True):
            same.grad = torch.randn_like(param)
            param.grad = same.grad.clone()
        other.step()
        if step < 3:
            for param, same in zip(ours, theirs, strict=True):
                param.data.copy_(same.data)
            one.load_state_dict({**one.state_dict(), "state": copy.deepcopy(other.state_dict()["state"])})
        else:
            one.step()
    assert error_of(zip([p.detach() for p in ours], [p.detach() for p in theirs], strict=True)) <= EXACT


@every_name
def test_norm_based_optimizers_with_zero_parameters_or_gradients_match_formula(name: str) -> None:
    kind, formula, options = OPTIONS[name]
    params = [
        nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)),
        nn.Parameter(torch.randn(4, 3, dtype=torch.float64)),
    ]
    params += [nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))]
    plain, states = [param.detach().clone() for param in params], [dict[str, Any](), dict[str, Any]()]
    optimizer = kind(params, **options)
    for step in range(4):
        grads = [torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)]
        for param, grad in zip(params, [*grads, torch.zeros(0, 3, dtype=torch.float64)], strict=True):
            param.grad = grad.clone()
        optimizer.step()
        formula(plain[:2], grads, states, **options)
        assert torch.isfinite(params[0]).all(), step
        assert error_of(zip([param.detach() for param in params[:2]], plain[:2], strict=True)) <= EXACT


@every_name
def test_norm_based_optimizers_accept_learning_rate_tensor(name: str) -> None:
    kind, _, options = OPTIONS[name]
    found = []
    for rate in (options["lr"], torch.tensor(options["lr"], dtype=torch.float64)):
        make = partial(kind, **{**options, "lr": rate})
        found.append([one for one, _ in side_by_side(make, lambda params, grads: None, torch.float64)])
    assert error_of(zip(*found, strict=True)) <= EXACT


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LAMB, {"lr": -1.0}),
        (LAMB, {"betas": (0.9, 1.0)}),
        (LAMB, {"eps": float("nan")}),
        (LARS, {"momentum": -0.1}),
        (LARS, {"trust_coeff": 0.0}),
        (LARS, {"nesterov": True}),
        (StableAdamW, {"eps": 0.0}),
        (StableAdamW, {"betas": (0.9, -0.1)}),
        (Adafactor, {"d": 0.5}),
        (Adafactor, {"beta2_decay": 0.8}),
        (Adafactor, {"eps": (1e-3, None)}),
        (CAME, {"lr": 0.1, "betas": (0.9, 0.99)}),
        (CAME, {"lr": 0.1, "clip_threshold": 0.0}),
        (CAME, {"lr": 0.1, "eps": (0.0, 1e-16)}),
    ],
)
def test_norm_based_optimizers_reject_invalid_options(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{list(options)[-1]}=.*: .*(give|must be)"):
        kind([nn.Parameter(torch.ones(2, 2))], **options)


# On random layouts --------------------------------------------------------------------------------------------------------


def assert_dense(cases: list[tuple[Layout, str]], found: list[list[list[list[Part]]]], steps: int) -> None:
    """Assert that all cases equal the dense update.

    ``cases`` are layouts and names of `STATES`; ``found`` has the shards per case, rank and optimizer.
    """
    for (layout, state), by_rank in zip(cases, found, strict=True):
        for index, make in enumerate(EACH):
            own = [of_rank[index] for of_rank in by_rank]
            assert largest_error(own, alone(layout, make, steps)) <= EXACT, f"{NAMES[index]}, {state}, {layout}"
            assert copies_differ(own) == [], f"{NAMES[index]}, {state}, {layout}"


@random_cases(random_layouts(), 10)
def test_norm_based_optimizers_match_dense_update_on_random_layouts(
    world: World, drawn: list[tuple[Layout, str]]
) -> None:
    calls = [(layout.topology.world_size, (layout, EACH, STATES[state], 3)) for layout, state in drawn]
    assert_dense(drawn, world.run_each(each_trained, calls), 3)


def unbound(name: str, params: Iterable[Any]) -> torch.optim.Optimizer:
    """Disable binding, so that every shard is treated as a tensor of its own. This is wrong."""
    optimizer: Any = MAKES[name](params)
    optimizer.bind = lambda pieces, registry: None
    return optimizer  # type: ignore[no-any-return]


@pytest.mark.long
def test_norm_based_optimizers_that_treat_shards_as_full_tensors_differ_from_dense_update(world: World) -> None:
    layout = LAYOUTS["grid"]
    by_rank = world.run(4, each_trained, layout, [partial(unbound, name) for name in NAMES], {}, 6)
    for index, make in enumerate(EACH):
        assert largest_error([own[index] for own in by_rank], alone(layout, make, 6)) > 1e-3, NAMES[index]


# Properties of a step, and checkpoints --------------------------------------------------------------------------------


@pytest.mark.long
def test_norm_based_optimizers_need_one_all_reduce_or_two_per_rank_set(world: World) -> None:
    """LAMB, LARS and StableAdamW need one all-reduce over the world if any tensor is sharded. Adafactor and CAME need two
    all-reduces per distinct set of ranks over which a tensor is sharded. The counts are in addition to the collectives of
    AdamW or SGD."""
    cases: list[tuple[str, str, list[int]]] = [  # per rank, the number of rank sets over which its tensors are sharded
        ("one rank", "whole", [0]),
        ("data", "whole", [0, 0]),  # nothing is sharded
        ("tensor", "whole", [1, 1]),
        ("grid", "whole", [1, 1, 2, 2]),  # two of the four ranks hold `kernel`
        ("data", "ZeRO-1", [1, 1]),
    ]
    for name, state, sets in cases:
        layout = WHOLE_LAYOUTS[name]
        found = world.run(layout.topology.world_size, beyond_sgd, layout, EACH, STATES[state])
        for rank, (count, of_rank) in enumerate(zip(sets, found, strict=True)):
            norms = {"all_reduce": 1} if count else {}
            statistics = {"all_reduce": 2 * count} if count else {}
            assert of_rank == [norms, norms, norms, statistics, statistics], f"{name}, {state}, rank {rank}"


@pytest.mark.long
@pytest.mark.parametrize("state", ["whole", "ZeRO-2"])
def test_third_step_of_norm_based_optimizers_needs_no_host_synchronization(world: World, state: str) -> None:
    world.run(4, without_host_reads, LAYOUTS["data x tensor"], EACH, STATES[state])


@pytest.mark.long
def test_overflow_on_one_rank_leaves_norm_based_optimizers_unchanged(world: World) -> None:
    layout = LAYOUTS["data x tensor"]
    cases: list[Any] = [
        (torch.float64, STATES["ZeRO-2"]),
        (torch.float32, {"precision": NaiveFp16(init_scale=64.0)}),
    ]
    found = world.run_each(changed_by_overflow, [(4, (layout, EACH, *case)) for case in cases])
    assert found == [[[[]] * len(EACH)] * 4] * len(cases)


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("precision", [Bf16(), NaiveFp16(init_scale=64.0)], ids=["bf16", "fp16"])
def test_norm_based_optimizers_match_dense_update_with_master_weights_and_accumulation(
    world: World, precision: Any
) -> None:
    """Gradients are exact in both dtypes, also scaled, so the master weights differ from the dense run only by float32
    rounding."""
    layout = LAYOUTS["data x tensor"]
    sharded, whole = world.run_each(
        in_mode,
        [
            (4, (layout, EACH, {"precision": precision, **STATES["ZeRO-2"]})),
            (4, (layout, EACH, {"precision": precision, "accumulation_steps": 2}, 2)),
        ],
    )
    for index, make in enumerate(EACH):
        for found, micros in ((sharded, 1), (whole, 2)):
            own = [of_rank[index] for of_rank in found]
            assert largest_error(own, alone(layout, make, 5, micros)) < 1e-5, NAMES[index]
            assert copies_differ(own) == [], NAMES[index]


@pytest.mark.long
def test_norm_based_optimizers_resume_on_another_layout(world: World, tmp_path: Path) -> None:
    """Neither layout has a data axis, so the full gradients are equal on both layouts."""
    rows = Layout((("tensor", 2),), {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor")})
    columns = Layout((("row", 2), ("col", 2)), {"up": P("row", "col"), "down": P("col"), "kernel": P("col")})
    saved = [(2, (rows, MAKES[name], tmp_path / name, range(4), False, STATES["offload"])) for name in NAMES]
    world.run_each(run_to, saved)
    sharded = {"states": Sharded("row")}
    found = world.run_each(
        run_to, [(4, (columns, MAKES[name], tmp_path / name, range(4, 7), True, sharded)) for name in NAMES]
    )
    for name, by_rank in zip(NAMES, found, strict=True):
        assert largest_error(by_rank, alone(columns, MAKES[name], 7)) <= EXACT, name
        assert copies_differ(by_rank) == [], name


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("state", ["ZeRO-1", "ZeRO-2"])
def test_full_tensor_optimizers_with_complete_shards_in_zero1_or_zero2_match_dense_update(
    world: World, state: str
) -> None:
    """With the usual bucket size, the slice of a rank contains complete shards as flat tensors."""
    layout = LAYOUTS["data x tensor"]
    by_rank = world.run(4, each_trained, layout, list(OPTIMIZERS.values()), STATES[state], 7, None)
    for index, (name, make) in enumerate(OPTIMIZERS.items()):
        own = [of_rank[index] for of_rank in by_rank]
        assert largest_error(own, alone(layout, make, 7)) <= EXACT, name
        assert copies_differ(own) == [], name
