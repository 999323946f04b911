"""The picture of the 2-D linear layer equals the output of its script, and matches the shards and sums of real ranks."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from meshstep.optim import ParallelOptimizer
from meshstep.parallel import BiasLayout, Linear2D, P, ProcessGroupRegistry, Topology, declare, shard, spec_of
from run_example import example
from world import World

ROOT = Path(__file__).parent.parent.parent
PICTURE = ROOT / "docs" / "pictures" / "linear_2d.svg"
SVG = "{http://www.w3.org/2000/svg}"


def test_linear_2d_picture_equals_the_output_of_its_script() -> None:
    drawn = example("draw_linear_2d").draw()
    command = "python examples/draw_linear_2d.py docs/pictures/linear_2d.svg"
    assert PICTURE.read_text(encoding="utf-8") == drawn, f"run: {command}"


def test_norms_page_shows_the_linear_2d_picture() -> None:
    assert "(../pictures/linear_2d.svg)" in (ROOT / "docs" / "explanation" / "NORMS_OF_LAYOUTS.md").read_text()


def test_linear_2d_picture_fits_its_frame() -> None:
    root = ET.fromstring(PICTURE.read_text(encoding="utf-8"))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0
        assert x + w <= width
        assert y + h <= height
    for text in root.iter(f"{SVG}text"):
        if text.attrib["text-anchor"] == "start":  # allow 7.3 units per character, for a wide font
            assert float(text.attrib["x"]) + 7.3 * len(text.text or "") <= width, text.text


def facts(layout: BiasLayout) -> dict[str, tuple[str, tuple[int, ...], Fraction, tuple[int, ...]]]:
    """Return the facts that the picture shows, for each parameter of a real layer on this rank.

    The facts are: spec, indices of local elements, weight in the norm, and the ranks over which the norm is summed.
    """
    script = example("draw_linear_2d")
    with ProcessGroupRegistry(Topology(row=2, col=2)) as registry:
        layer = Linear2D(script.IN, script.OUT, registry, bias=layout)
        declare(layer)
        plan = ParallelOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), registry).plan
        found = {}
        for entry, index, weight in zip(plan.entries, plan.bucket_indices, plan.replica_weights, strict=True):
            full = torch.arange(16).reshape(4, 4) if entry.name == "weight" else torch.arange(4)
            param = layer.get_parameter(entry.name)
            elements = shard(full, spec_of(param), registry)
            assert elements.shape == param.shape
            ranks = registry.ranks(*plan.buckets[index].axes(registry.topology))
            found[entry.name] = str(entry.spec), tuple(elements.flatten().tolist()), Fraction(weight), ranks
        return found


@pytest.mark.parametrize("layout", get_args(BiasLayout))
def test_linear_2d_picture_matches_shards_and_sums_of_real_ranks(world: World, layout: BiasLayout) -> None:
    shown = {param.title: param for param in example("draw_linear_2d").linear_2d_parameters()}
    for rank, found in enumerate(world.run(4, facts, layout)):
        for name, title in (("weight", "weight"), ("bias", f'bias="{layout}"')):
            param = shown[title]
            held = param.held[rank]
            if name not in found:
                assert (held.elements, held.weight) == ((), 0)
                continue
            spec, elements, weight, ranks = found[name]
            assert (str(param.spec), held.elements, held.weight) == (spec, elements, weight)
            assert ranks in param.groups


def test_linear_2d_picture_counts_every_element_once() -> None:
    for param in example("draw_linear_2d").linear_2d_parameters():
        counts: Any = [
            sum(held.weight for held in param.held if element in held.elements)
            for element in range(torch.Size(param.shape).numel())
        ]
        assert counts == [1] * len(counts), param.title
    copied = example("draw_linear_2d").parameter("copied", P(), (4,), Topology(row=2, col=2))
    assert [held.weight for held in copied.held] == [Fraction(1, 4)] * 4
    assert copied.groups == ((0,), (1,), (2,), (3,))
