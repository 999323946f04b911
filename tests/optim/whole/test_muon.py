"""Muon: torch's numbers, its formula, and on every layout the dense model's update to the bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshstep.amp import Bf16, NaiveFp16
from meshstep.optim import (
    AsyncSaver,
    Muon,
    ParallelOptimizer,
    Sharded,
    load_checkpoint,
    save_checkpoint,
)
from meshstep.optim.whole import reference
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, blocks, declare
from meshstep.testing.strategies import specs, topologies
from planted import LAYOUTS, SHAPES, Layout, Planted, parts, run_step
from probes import collectives, no_host_reads
from torch import Tensor, nn
from whole_runs import STATES, WHOLE_LAYOUTS, alone, copies_differ, largest_error, trained
from world import World
from zero_models import small_buckets

EXACT = 1e-12


def muon(params: Iterable[Any], **options: Any) -> Muon:
    given: dict[str, Any] = {"ns_dtype": None, "adamw": {"lr": 0.05}, "blocks": {"up": 2}, **options}
    return Muon(params, lr=0.1, **given)


# Its numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_its_numbers_are_torchs(rule: Any, nesterov: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.8, "nesterov": nesterov}
    options |= {"adjust_lr_fn": rule, "ns_steps": 4}
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((6, 10), (12, 4), (5, 5))]
    theirs = [nn.Parameter(param.detach().clone()) for param in ours]
    one, other = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(10):
        for param, same in zip(ours, theirs, strict=True):
            param.grad = torch.randn_like(param)
            same.grad = param.grad.clone()
        one.step()
        other.step()
    for param, same in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, same, rtol=1e-6, atol=1e-6)


def test_alone_it_is_its_formula() -> None:
    torch.manual_seed(0)
    ours = {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64))
        for name, shape in {"w": (6, 10), "tall": (12, 4), "bias": (7,), "embed": (9, 4)}.items()
    }
    plain = {name: param.detach().clone() for name, param in ours.items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in ours}
    optimizer = Muon(ours.items(), lr=0.03, ns_dtype=None, adamw={"lr": 0.01, "weight_decay": 0.3})
    for _ in range(10):
        grads = {name: torch.randn_like(param) for name, param in ours.items()}
        for name, param in ours.items():
            param.grad = grads[name]
        optimizer.step()
        of = [[one[name] for name in ("w", "tall")] for one in (plain, grads, states)]
        reference.muon(*of, lr=0.03)  # type: ignore[arg-type]
        of = [[one[name] for name in ("bias", "embed")] for one in (plain, grads, states)]
        reference.adamw(*of, lr=0.01, weight_decay=0.3)  # type: ignore[arg-type]
    for name, param in ours.items():
        torch.testing.assert_close(param.detach(), plain[name], rtol=EXACT, atol=EXACT)


def test_stacks_blocks_and_convolutions_are_the_matrices_they_are_made_of() -> None:
    torch.manual_seed(0)
    shapes = {"stack": (3, 4, 6), "qkv": (12, 5), "heads": (8, 5), "kernel": (6, 2, 3, 3)}
    fused = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    apart = [
        *(nn.Parameter(part.clone()) for part in fused["stack"].detach()),
        *(nn.Parameter(part.clone()) for part in fused["qkv"].detach().split([6, 2, 4])),
        *(nn.Parameter(part.clone()) for part in fused["heads"].detach().chunk(4)),
        nn.Parameter(fused["kernel"].detach().flatten(1).clone()),
    ]
    options: dict[str, Any] = {"lr": 0.1, "ns_dtype": None}
    one = Muon(fused.items(), blocks={"qkv": (6, 2, 4), "he*": 4}, **options)
    other = Muon(apart, **options)
    for _ in range(3):
        for param in fused.values():
            param.grad = torch.randn_like(param)
        grads = {name: param.grad for name, param in fused.items()}
        of = [
            *grads["stack"],
            *grads["qkv"].split([6, 2, 4]),
            *grads["heads"].chunk(4),
            grads["kernel"].flatten(1),
        ]
        for param, grad in zip(apart, of, strict=True):
            param.grad = grad.clone()
        one.step()
        other.step()
    found = [
        *fused["stack"].detach(),
        *fused["qkv"].detach().split([6, 2, 4]),
        *fused["heads"].detach().chunk(4),
        fused["kernel"].detach().flatten(1),
    ]
    for whole, part in zip(found, apart, strict=True):
        torch.testing.assert_close(whole, part.detach(), rtol=EXACT, atol=EXACT)


# On every layout ----------------------------------------------------------------------------------------------------------

CASES = [
    (name, state)
    for name, layout in WHOLE_LAYOUTS.items()
    for state in STATES
    if "data" in layout.topology.axes or not state.startswith("ZeRO")
]


def test_it_is_the_dense_update_on_every_layout_and_placement(world: World) -> None:
    cases = [(WHOLE_LAYOUTS[name], muon, STATES[state]) for name, state in CASES]
    found = world.run_each(trained, [(case[0].topology.world_size, case) for case in cases])
    for (name, state), by_rank in zip(CASES, found, strict=True):
        assert largest_error(by_rank, alone(WHOLE_LAYOUTS[name], muon)) <= EXACT, f"{name}, {state}"
        assert copies_differ(by_rank) == [], f"{name}, {state}"


def unbound(params: Iterable[Any]) -> Muon:
    """What is wrong: every piece is a matrix."""
    optimizer = muon(params, blocks={})
    optimizer.bind = lambda pieces, registry: None  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("name", ["tensor", "grid", "fused blocks"])
def test_bare_pieces_fail_the_same_comparison(world: World, name: str) -> None:
    layout = WHOLE_LAYOUTS[name]
    by_rank = world.run(layout.topology.world_size, trained, layout, unbound)
    assert largest_error(by_rank, alone(layout, muon)) > 1e-3


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[Layout, str]:
    topology = draw(topologies(4, axes=("data", "row", "col", "pipe", "expert"), most_axes=3))
    kinds = draw(st.sampled_from([("sharded",), ("sharded", "owned", "tied"), ("sharded", "partial", "diagonal")]))
    layout = {name: draw(specs(topology, shape, kinds, uneven=True)) for name, shape in SHAPES.items()}
    axes = tuple(zip(topology.axes, topology.sizes, strict=True))
    state = draw(st.sampled_from(list(STATES))) if "data" in topology.axes else "whole"
    return Layout(axes, layout), state


@settings(max_examples=6)
@given(st.lists(random_layouts(), min_size=5, max_size=5))
def test_it_is_the_dense_update_on_random_layouts(world: World, cases: list[tuple[Layout, str]]) -> None:
    run = [(layout, muon, STATES[state], 4) for layout, state in cases]
    found = world.run_each(trained, [(case[0].topology.world_size, case) for case in run])
    for (layout, state), by_rank in zip(cases, found, strict=True):
        assert largest_error(by_rank, alone(layout, muon, 4)) <= EXACT, (layout, state)
        assert copies_differ(by_rank) == [], (layout, state)
