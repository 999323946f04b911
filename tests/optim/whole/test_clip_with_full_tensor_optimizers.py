"""Clipping with normalizing optimizers: groups that are not clipped or have their own threshold, and unit-wise
clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from meshstep.optim import LAMB, Adaptive, ByGroup, Muon
from planted import LAYOUTS, Dense, Full, Layout, start
from torch import Tensor, nn
from whole_runs import STATES, Make, copies_differ, largest_error, trained
from world import World

EXACT, STEPS = 1e-12, 6
MATRICES = ("up", "down", "kernel", "table")


def muon(own: float, params: Iterable[Any]) -> Muon:
    """Give matrices their own threshold; the other parameters share the optimizer's threshold."""
    optimizer = Muon(params, lr=0.1, ns_dtype=None, adamw={"lr": 0.05})
    for group in optimizer.param_groups:
        group["max_norm"] = own if group["algorithm"] == "muon" else None
    return optimizer


def lamb(params: Iterable[Any]) -> LAMB:
    return LAMB(params, lr=0.05, weight_decay=0.1)


def clipped_alone(layout: Layout, make: Make, clip: Callable[[Full, Full], Full]) -> Full:
    """Train in one process with gradients clipped by ``clip``. Return the full parameters."""
    dense = Dense(layout)
    params = {key: nn.Parameter(start(key)) for key in layout.keys}
    optimizer = make([(name, param) for (name, _), param in params.items()])
    for step in range(STEPS):
        found = clip(dense.gradients(step), {key: param.detach() for key, param in params.items()})
        for key, gradient in found.items():
            params[key].grad = gradient
        optimizer.step()
    return {key: param.detach() for key, param in params.items()}


def in_two(matrices: float, others: float, gradients: Full, weights: Full) -> Full:
    """Clip the gradients of all matrices by their total norm, and the other gradients by their total norm. Return them."""
    found: Full = {}
    for longest, is_matrix in ((matrices, True), (others, False)):
        own = {key: value for key, value in gradients.items() if (key[0] in MATRICES) == is_matrix}
        norm = torch.stack([value.norm() for value in own.values()]).norm()
        found |= {key: value * (longest / (norm + 1e-6)).clamp(max=1.0) for key, value in own.items()}
    return found


def by_unit(clipping: float, eps: float, gradients: Full, weights: Full) -> Full:
    """Clip rows of matrices, and vectors as a whole. Return the clipped gradients."""

    def clipped(gradient: Tensor, weight: Tensor) -> Tensor:
        dims = tuple(range(1, gradient.dim())) if gradient.dim() > 1 else None
        norms = [
            value.square().sum(dims, keepdim=True) if dims else value.square().sum() for value in (gradient, weight)
        ]
        g_norm, w_norm = (norm.sqrt() for norm in norms)
        return gradient * (clipping * w_norm.clamp(min=eps) / g_norm.clamp(min=1e-6)).clamp(max=1.0)

    return {key: clipped(gradient, weights[key]) for key, gradient in gradients.items()}


CASES = [
    ("one rank", "whole"),
    ("tensor", "whole"),
    ("grid", "offload"),
    ("data x tensor", "whole"),
    ("data x tensor", "ZeRO-2"),
    ("diagonal", "whole"),
]


def assert_clipped(world: World, make: Make, options: dict[str, Any], clip: Callable[[Full, Full], Full]) -> None:
    calls = [
        (LAYOUTS[name].topology.world_size, (LAYOUTS[name], make, {**STATES[state], **options}, STEPS))
        for name, state in CASES
    ]
    for (name, state), by_rank in zip(CASES, world.run_each(trained, calls), strict=True):
        wanted = clipped_alone(LAYOUTS[name], make, clip)
        assert largest_error(by_rank, wanted) <= EXACT, f"{name}, {state}"
        assert copies_differ(by_rank) == [], f"{name}, {state}"


@pytest.mark.long
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("own", [inf, 2.0], ids=["not clipped", "by their own norm"])
def test_muon_matrices_can_have_their_own_clip_threshold(world: World, own: float) -> None:
    assert_clipped(world, partial(muon, own), {"max_norm": 0.5}, partial(in_two, own, 0.5))


@pytest.mark.long
def test_unit_wise_clipping_with_lamb_matches_dense_model(world: World) -> None:
    assert_clipped(world, lamb, {"max_norm": Adaptive(0.1, eps=0.01)}, partial(by_unit, 0.1, 0.01))


def test_by_group_rule_allows_infinite_group_threshold_but_not_infinite_others_argument() -> None:
    ByGroup((inf, 1.0), 2.0).check()
    with pytest.raises(ValueError, match="ByGroup others=inf: give a finite number"):
        ByGroup((1.0,), inf).check()
    with pytest.raises(ValueError, match=r"thresholds\[0\]=nan: .*or math\.inf to leave the group unclipped"):
        ByGroup((float("nan"),)).check()
