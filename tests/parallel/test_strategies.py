"""Hypothesis strategies that draw layouts, and their imports."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import forked_python
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from meshstep.optim import global_norm
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate, local_shape, shard
from meshstep.testing import Ranks
from meshstep.testing.strategies import Kind, Layout, dtypes, layouts, shapes, specs, topologies
from torch import nn
from world import World


@given(layout=layouts())
def test_drawn_layouts_are_valid_on_their_topology(layout: Layout) -> None:
    topology, shape, spec = layout
    assert topology.world_size <= 8
    spec.validate(len(shape), topology)
    local_shape(shape, spec, topology)  # raises unless every sharded dim is divisible
    assert sum(spec.holds(topology.coordinate(rank), topology) for rank in range(topology.world_size)) > 0


@given(layout=layouts(uneven=True))
def test_drawn_uneven_layouts_have_a_local_shape_on_each_rank(layout: Layout) -> None:
    topology, shape, spec = layout
    for rank in range(topology.world_size):
        assert len(local_shape(shape, spec, topology, topology.coordinate(rank))) == len(shape)


@given(data=st.data())
def test_topologies_and_specs_strategies_respect_their_limits(data: st.DataObject) -> None:
    topology = data.draw(topologies(6, axes=("tensor", "data"), most_axes=2, largest=3))
    assert {*topology.axes} <= {"tensor", "data"}
    assert topology.world_size <= 6
    assert max(topology.sizes) <= 3
    only: tuple[Kind, ...] = ("sharded",)
    spec = data.draw(specs(topology, (4, 4), kinds=only))
    assert spec.named_axes == spec.sharded_axes
    assert "data" not in spec.sharded_axes


@pytest.mark.parametrize("kind", get_args(Kind))
def test_layouts_strategy_draws_every_kind_of_layout(kind: Kind) -> None:
    def has(layout: Layout) -> bool:
        spec = layout.spec
        along = {owner for _, owner in spec.owned}
        return {
            "copied": not spec.named_axes,
            "sharded": bool(spec.sharded_axes),
            "partial": bool(spec.partial),
            "owned": any(isinstance(owner, int) for owner in along),
            "diagonal": any(isinstance(owner, str) for owner in along),
            "tied": bool(spec.tied),
        }[kind]

    without_shrinking = settings(max_examples=2000, phases=[Phase.generate])
    found = find(layouts(), lambda layout: has(layout) and layout.topology.world_size > 1, settings=without_shrinking)
    assert len(found.topology.axes) <= 4


@given(shape=shapes(2, 5, smallest=3), dtype=dtypes())
def test_shapes_and_dtypes_strategies_respect_their_limits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert len(shape) <= 2
    assert all(3 <= length <= 5 for length in shape)
    assert dtype.is_floating_point


COMPLETE: tuple[Kind, ...] = ("sharded", "owned", "diagonal")  # gradients of these kinds need no reduction first


# A user's property test starts here ...
def norm_of_pieces(layout: Layout, scale: float) -> float:
    with ProcessGroupRegistry(layout.topology) as registry:
        piece = nn.Parameter(shard(full_gradient(layout, scale), layout.spec, registry))
        held = layout.spec.holds(registry.coordinate, layout.topology)
        if held:
            annotate(piece, layout.spec)
        piece.grad = piece.detach().clone()
        return float(global_norm([piece] if held else [], registry).total_norm)


@settings(max_examples=20)
@given(layouts(4, axes=("data", "row", "col", "tensor"), kinds=COMPLETE), st.floats(0.1, 100))
def test_norm_of_shards_equals_norm_of_full_tensor(ranks: Ranks, layout: Layout, scale: float) -> None:
    norms = ranks.run(norm_of_pieces, layout.topology.world_size, layout, scale)
    assert norms == pytest.approx([full_gradient(layout, scale).norm().item()] * layout.topology.world_size, rel=1e-12)


# ... and ends here.


def full_gradient(layout: Layout, scale: float) -> torch.Tensor:
    return scale * torch.randn(layout.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def ranks(world: World) -> Ranks:
    """Replace the plugin's fixture by the ranks of this test suite."""
    return world.ranks


def test_norm_is_wrong_if_replicas_are_declared_as_shards(ranks: Ranks) -> None:
    norms = ranks.run(norm_of_copies, 2)
    assert norms == pytest.approx([2**0.5 * 2.0] * 2)


def norm_of_copies() -> float:
    with ProcessGroupRegistry(Topology(tensor=2)) as registry:
        piece = nn.Parameter(torch.zeros(4))
        annotate(piece, P("tensor"))  # wrong: both ranks have the full tensor
        piece.grad = torch.ones(4)
        return float(global_norm([piece], registry).total_norm)


def test_testing_package_does_not_import_hypothesis() -> None:
    code = "import sys; import meshstep.testing, meshstep.pytest_plugin; assert 'hypothesis' not in sys.modules"
    done = forked_python.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_pytest_plugin_does_not_import_torch() -> None:
    code = "import sys; import meshstep.pytest_plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
