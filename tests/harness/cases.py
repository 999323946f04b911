"""Random layouts with random gradients, and the dense reference values for them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf

import torch
from hypothesis import strategies as st
from meshstep.parallel import P, ProcessGroupRegistry, Topology, annotate
from meshstep.testing.strategies import DTYPES, specs, topologies
from torch import Tensor, nn

NORM_TYPES = (1.0, 2.0, 3.0, inf)
Axes = tuple[tuple[str, int], ...]


def axes_of(topology: Topology) -> Axes:
    return tuple(zip(topology.axes, topology.sizes, strict=True))


@dataclass(frozen=True)
class Param:
    """One logical parameter: full shape, spec, gradient dtype, and whether its gradient is missing."""

    shape: tuple[int, ...]
    spec: P
    dtype: torch.dtype = torch.float32
    missing: bool = False


@dataclass(frozen=True)
class Case:
    """A mesh and the parameters on it; the gradients are generated from the seed."""

    axes: Axes
    params: tuple[Param, ...]
    seed: int = 0
    scale: float = 1.0

    @cached_property
    def topology(self) -> Topology:
        return Topology(roles=None, **dict(self.axes))

    def full_gradient(self, index: int, stage: tuple[int, ...]) -> Tensor:
        """Return the full gradient, of which the ranks of pipeline stage ``stage`` hold shards; zeros if the gradient is
        missing."""
        param = self.params[index]
        stage = (
            () if any(axis in self.topology.pipe_axes for axis, _ in (*param.spec.tied, *param.spec.owned)) else stage
        )
        if any(axis in self.topology.pipe_axes for axis in param.spec.sharded_axes):
            stage = ()
        generator = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, index, stage)).encode()))
        full = torch.randn(param.shape, generator=generator, dtype=torch.float64) * self.scale
        return torch.zeros_like(full) if param.missing else full.to(param.dtype).double()

    def stage_of(self, rank: int) -> tuple[int, ...]:
        return tuple(self.topology.coordinate_of(rank, axis) for axis in self.topology.pipe_axes)

    def holds(self, index: int, rank: int) -> bool:
        return self.params[index].spec.holds(self.topology.coordinate(rank), self.topology)

    def piece(self, index: int, rank: int) -> Tensor:
        """Return the shard of the gradient that ``rank`` holds, split like torch.chunk; it may be empty."""
        full = self.full_gradient(index, self.stage_of(rank))
        return slice_of(full, self.params[index].spec, self.topology, rank)

    def dense_powers(self, norm_type: float) -> list[Tensor]:
        """Return the sum of |g|^p (for inf the largest |g|) of each logical parameter, in float64. If a spec does not name
        the pipeline axis, each stage has a logical parameter of its own."""
        powers = []
        stages = list(product(*(range(self.topology.size(axis)) for axis in self.topology.pipe_axes)))
        for index, param in enumerate(self.params):
            named = {*param.spec.named_axes} & {*self.topology.pipe_axes}
            for stage in stages[:1] if named else stages:
                grad = self.full_gradient(index, stage).abs()
                none = grad.new_zeros(())
                powers.append((grad.max() if grad.numel() else none) if norm_type == inf else grad.pow(norm_type).sum())
        return powers

    def dense_norm(self, norm_type: float) -> float:
        powers = torch.stack(self.dense_powers(norm_type)) if self.params else torch.zeros(1, dtype=torch.float64)
        return float(powers.max() if norm_type == inf else powers.sum() ** (1 / norm_type))


def slice_of(full: Tensor, spec: P, topology: Topology, rank: int) -> Tensor:
    """Return the shard of ``full`` that ``rank`` holds. A dim is split like torch.chunk, so the last
    shards may be shorter or empty; a dim with `blocks` must divide evenly.
    """
    for dim in range(full.dim()):
        axes = spec.dim_axes(dim)
        if any(axis in dict(spec.blocks) for axis in axes):
            for axis in axes:
                sizes = spec.block_sizes(axis)
                blocks = full.split([full.shape[dim] // sum(sizes) * size for size in sizes], dim)
                at = topology.coordinate_of(rank, axis)
                full = torch.cat([block.chunk(topology.size(axis), dim)[at] for block in blocks], dim)
        elif axes:
            pieces, index = topology.size(*axes), 0
            for axis in axes:
                index = index * topology.size(axis) + topology.coordinate_of(rank, axis)
            length = -(-full.shape[dim] // pieces)
            start = min(index * length, full.shape[dim])
            full = full.narrow(dim, start, min(length, full.shape[dim] - start))
    return full.clone()


def parameters_on(case: Case, registry: ProcessGroupRegistry) -> list[tuple[str, nn.Parameter]]:
    from meshstep.optim.gradients.in_place import mark_complete

    found = []
    for index, param in enumerate(case.params):
        if case.holds(index, registry.global_rank):
            grad = case.piece(index, registry.global_rank).to(param.dtype)
            value = nn.Parameter(torch.zeros_like(grad))
            annotate(value, param.spec, f"p{index}")
            value.grad = None if param.missing else grad
            mark_complete(value)
            found.append((f"p{index}", value))
    return found


@st.composite
def cases(draw: st.DrawFn, most_ranks: int = 8, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    """Draw a mesh of at most ``most_ranks`` ranks, and one to five parameters on it."""
    topology = draw(topologies(most_ranks))
    params = []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        spec = draw(specs(topology, shape, uneven=True))
        params.append(Param(shape, spec, draw(st.sampled_from(dtypes)), draw(st.integers(0, 5)) == 0))
    return Case(
        axes_of(topology), tuple(params), draw(st.integers(0, 2**16)), draw(st.sampled_from([1.0, 1e-4, 300.0]))
    )
