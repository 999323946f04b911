"""`infer` on the library's tensor-parallel layers without their declarations.

If two axes have the same size, it may not know which of them shards which dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from grid_models import VOCABULARY, Lm
from meshstep.optim.proof.prove import infer
from meshstep.parallel import (
    LayerNorm2D,
    LayerNorm3D,
    Linear2D,
    Linear3D,
    P,
    ProcessGroupRegistry,
    Topology,
    cross_entropy_2d,
    declare,
    gather_objects,
    reduce_from,
    shard,
    spec_of,
    unshard,
)
from scenarios import Tensor1D
from torch import Tensor, nn
from world import World


class Grid(nn.Module):
    """Two 2D layers and a norm, with a choice of bias layouts."""

    def __init__(self, registry: ProcessGroupRegistry, bias: Any) -> None:
        super().__init__()
        self.registry = registry
        self.up = Linear2D(12, 18, registry, bias=bias, dtype=torch.float64)
        self.norm = LayerNorm2D(18, registry, dtype=torch.float64)
        self.head = Linear2D(18, 24, registry, bias=bias, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = shard(F.one_hot(ids, 12).double(), P("row", None, "col"), self.registry)
        targets = shard(ids, P("row"), self.registry)
        return cross_entropy_2d(self.head(self.norm(F.gelu(self.up(x)))), targets, self.registry)


class Cube(nn.Module):
    """Two 3D linear layers and a norm; the second linear layer swaps the input and output axes."""

    def __init__(self, registry: ProcessGroupRegistry) -> None:
        super().__init__()
        self.registry = registry
        self.up = Linear3D(12, 18, registry, dtype=torch.float64)
        self.norm = LayerNorm3D(18, registry, input="output", output="input", dtype=torch.float64)
        self.down = Linear3D(18, 12, registry, input="output", output="input", dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = shard(F.one_hot(ids, 12).double(), P(("weight", "input"), None, "output"), self.registry)
        out = self.down(F.gelu(self.norm(self.up(x))))
        return reduce_from((out - 0.1).square().sum(), self.registry, "weight", "input", "output")


class Case(NamedTuple):
    """A kind of model on a mesh. ``unknown``: `infer` can't tell which of two equally large axes shards which dim."""

    axes: tuple[tuple[str, int], ...]
    kind: str
    unknown: bool = False

    def model(self, registry: ProcessGroupRegistry) -> nn.Module:
        torch.manual_seed(11)
        if self.kind in ("1-D", "sequence"):
            return Tensor1D(registry, torch.float64, self.kind == "sequence")
        if self.kind in ("column", "all", "row0"):
            return Grid(registry, self.kind)
        if self.kind == "cube":
            return Cube(registry)
        family, _, tied = self.kind.partition(", ")
        return Lm(family, registry, 12, bool(tied))


CASES = [
    Case((("tensor", 2),), "1-D"),
    Case((("tensor", 2),), "sequence"),
    Case((("data", 2), ("tensor", 2)), "1-D"),
    Case((("data", 2), ("tensor", 2)), "sequence"),
    Case((("row", 2), ("col", 3)), "column"),
    Case((("row", 2), ("col", 3)), "all"),
    Case((("row", 2), ("col", 3)), "row0"),
    Case((("row", 2), ("col", 3)), "2-D"),
    Case((("row", 2), ("col", 3)), "2-D, tied"),
    Case((("depth", 2), ("row", 1), ("col", 3)), "2.5-D"),
    Case((("depth", 2), ("row", 2), ("col", 2)), "2.5-D", unknown=True),
    Case((("input", 2), ("weight", 1), ("output", 3)), "cube"),
    Case((("input", 2), ("weight", 2), ("output", 2)), "3-D", unknown=True),
    Case((("input", 2), ("weight", 2), ("output", 2)), "3-D, tied", unknown=True),
]


class Found(NamedTuple):
    """Results of one rank. ``unknown`` are the parameters for which `infer` doesn't know which axis shards which dim."""

    declared: dict[str, P]
    by_shapes: dict[str, P]
    by_values: dict[str, P]
    unknown: tuple[str, ...]
    proofs: tuple[str, str]


def inferred(case: Case) -> Found:
    with ProcessGroupRegistry(Topology(roles=None, **dict(case.axes))) as registry:
        topology = registry.topology
        model = case.model(registry)
        declare(model)
        held = dict(model.named_parameters())
        specs = {name: spec_of(param, topology) for name, param in held.items()}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, spec in {name: one for each in gather_objects(specs, registry) for name, one in each.items()}.items():
            full = unshard(held.get(name), spec, registry)
            shapes[name] = tuple(full.shape)
            if len(full.shape) == 1:  # initially zeros or ones, so that shards look like replicas
                full += torch.randn(full.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
                if name in held:
                    held[name].data.copy_(shard(full, spec, registry, uneven=True))
        rows = [registry.coordinate[axis] for axis in topology.data_axes]
        ids = torch.randint(VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(sum(rows)))
        first = infer(model, lambda model: model(ids), registry, shapes=shapes)
        second = infer(model, lambda model: model(ids), registry)
        specs = {name: without_ones(spec, topology) for name, spec in specs.items()}
        return Found(specs, first.rules, second.rules, first.dims_unknown, (str(first.proof), str(second.proof)))


def with_shapes_of_another_model() -> str:
    with ProcessGroupRegistry(Topology(row=2, col=3)) as registry:
        model = Grid(registry, "column")
        ids = torch.arange(12).reshape(12, 1)
        other = {"up.weight": (20, 12)}
        with pytest.raises(ValueError, match="don't fit the full shape") as told:
            infer(model, lambda model: model(ids), registry, shapes=other)
        return str(told.value)


def test_infer_rejects_shapes_that_do_not_fit_the_model(world: World) -> None:
    for told in world.run(6, with_shapes_of_another_model):
        assert told.startswith("up.weight: shards of shape (6, 6) don't fit the full shape (20, 12) in shapes=; give")


def without_ones(spec: P, topology: Topology) -> P:
    """Drop the axes of size 1, which cannot be inferred."""
    larger = [axis for axis in topology.axes if topology.size(axis) > 1]
    dims = [tuple(axis for axis in spec.dim_axes(dim) if axis in larger) for dim in range(len(spec.entries))]
    owned = {axis: owner for axis, owner in dict(spec.owned).items() if axis in larger}
    return P(*dims, partial=tuple(axis for axis in spec.partial if axis in larger), owned=owned)


def entries(spec: P) -> list[set[str]]:
    """Return for each dim the set of axes that shard it, without trailing dims that are not sharded.

    Two axes of which one owns along the other (``owned={"row": "col"}``) count as the same axis.
    """
    along = {axis: min(axis, owner) for axis, owner in dict(spec.owned).items() if isinstance(owner, str)}
    along |= {str(owner): along[axis] for axis, owner in dict(spec.owned).items() if axis in along}
    found = [{along.get(axis, axis) for axis in spec.dim_axes(dim)} for dim in range(len(spec.entries))]
    while found and not found[-1]:
        found.pop()
    return found


def kinds(spec: P) -> dict[str, object]:
    """Return the axes over which the parameter is sharded, partial or owner-only."""
    owned = dict(spec.owned)
    along = {*spec.sharded_axes, *owned} if any(isinstance(owner, str) for owner in owned.values()) else None
    return {"cut": along or set(spec.sharded_axes), "partial": set(spec.partial), "owned": None if along else owned}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}, {case.axes}")
def test_infer_finds_declared_layouts_of_library_layers(world: World, case: Case) -> None:
    for found in world.run(Topology(roles=None, **dict(case.axes)).world_size, inferred, case):
        assert found.by_shapes.keys() == found.by_values.keys() == found.declared.keys(), found.proofs
        for name, spec in found.declared.items():
            assert kinds(found.by_shapes[name]) == kinds(spec), (name, found.by_shapes[name], spec)
            assert kinds(found.by_values[name]) == kinds(spec), (name, found.by_values[name], spec)
            if name not in found.unknown:
                assert entries(found.by_shapes[name]) == entries(spec), (name, found.by_shapes[name], spec)
        assert bool(found.unknown) == case.unknown, found.unknown
