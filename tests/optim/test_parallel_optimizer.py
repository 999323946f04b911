"""ParallelOptimizer on real processes: twenty steps match torch on the dense model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from scenarios import SCENARIOS, Full, Run, train, train_dense
from world import World

STEPS = 20


def adamw(params: Any, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=fused)


def sgd(params: Any, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, fused=fused)


def merged(runs: list[Run], part: Callable[[Run], Full]) -> Full:
    """Return one full tensor per name, after checking that it is bitwise identical on all ranks that have it."""
    whole: Full = {}
    for run in runs:
        for name, tensor in part(run).items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"{name} differs between ranks"
    return whole


def assert_equal(found: Full, expected: Full, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name].double() - tensor).abs().max() / tensor.abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def compare(
    world: World, name: str, dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], **options: Any
) -> None:
    size = SCENARIOS[name].topology.world_size
    runs = world.run(size, train, name, dtype, make, STEPS, options)
    assert len({run.bits for run in runs}) == 1, "norms differ between ranks"
    dense = partial(make, fused=False) if dtype == torch.float64 else make
    end, gradients, norms = train_dense(
        name, merged(runs, lambda r: r.start), dense, STEPS, options.get("max_norm"), options.get("norm_type", 2.0)
    )
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    assert runs[0].norms == pytest.approx(norms, rel=tolerance)
    if options.get("max_norm"):
        assert min(norms) < options["max_norm"] < max(norms), "the threshold must clip some steps, but not all"
    assert_equal(merged(runs, lambda r: r.end), end, tolerance)
    assert_equal(merged(runs, lambda r: r.gradients), gradients, tolerance)


@pytest.mark.parametrize("name", SCENARIOS)
def test_twenty_sgd_steps_on_several_layouts_match_dense_model(world: World, name: str) -> None:
    compare(world, name, torch.float64, sgd, max_norm=SCENARIOS[name].threshold)


@pytest.mark.parametrize("name", ["tensor", "grid, bias on row 0", "data x sequence parallel"])
def test_twenty_float32_steps_of_fused_adamw_match_dense_model(world: World, name: str) -> None:
    compare(world, name, torch.float32, adamw, max_norm=SCENARIOS[name].threshold)


@pytest.mark.parametrize("p", [1.0, 3.0, float("inf")])
@pytest.mark.parametrize("name", ["data x tensor", "grid, bias on row 0", "pipe, tied"])
@pytest.mark.parametrize("reduction", ["packed", "per_group"])
def test_twenty_steps_with_norm_types_1_3_and_inf_match_dense_model(
    world: World, name: str, p: float, reduction: str
) -> None:
    typical = {
        "data x tensor": (6.0, 0.2, 0.12),
        "grid, bias on row 0": (15.5, 0.5, 0.25),
        "pipe, tied": (6.0, 0.26, 0.13),
    }
    threshold = typical[name][(1.0, 3.0, float("inf")).index(p)]
    compare(world, name, torch.float64, sgd, max_norm=threshold, norm_type=p, reduction=reduction)
