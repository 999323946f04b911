"""LoRA on sharded layers trains like a dense model whose weights have the product of the factors added."""

from __future__ import annotations

import math

import pytest
import torch
from lora_models import DEFAULT, LAYERS, LAYOUTS, MAX_NORM, Options, reference, trained
from world import World

LINEAR = ("up", "down", "head")
CASES = {
    **{
        layout: (layout, Options(blocks=3 if layout in ("tensor", "data and tensor", "grid") else 1))
        for layout in LAYOUTS
    },
    "sequence parallel": ("tensor", Options(sequence_parallel=True)),
    "rsLoRA": ("data and tensor", Options(adapters={"use_rslora": True})),
    "DoRA": ("data and tensor", Options(LINEAR, {"use_dora": True})),
    "DoRA, gathered": ("gathered outputs", Options(LINEAR, {"use_dora": True})),
    "DoRA, sequence parallel": ("tensor", Options(LINEAR, {"use_dora": True}, sequence_parallel=True)),
    "fused blocks of other sizes": ("gathered outputs", Options(blocks=(4, 1, 1))),
    "column layers only": ("tensor", Options(("up",))),
    "row layers only": ("tensor", Options(("down",))),
}


@pytest.mark.parametrize("case", CASES)
def test_lora_on_sharded_layers_trains_like_dense_lora(world: World, case: str) -> None:
    layout, options = CASES[case]
    ranks = math.prod(LAYOUTS[layout].topology.values())
    for first, norms, weights in world.run(ranks, trained, layout, options):
        expected_norms, expected = reference(first, options)
        assert min(expected_norms) > MAX_NORM, "every step should clip"
        assert weights.keys() == expected.keys()
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_initial_factors_are_equal_in_every_layout(world: World) -> None:
    starts = []
    for layout in ("tensor", "grid", "gathered outputs", "wide grid"):
        ranks = math.prod(LAYOUTS[layout].topology.values())
        starts += [first for first, _, _ in world.run(ranks, trained, layout, DEFAULT, 0, 0, True)]
    for start in starts:
        assert start.keys() == {f"{layer}.lora_{factor}" for layer in LAYERS for factor in "AB"}
        for name, value in start.items():
            assert torch.equal(value, starts[0][name]), name
