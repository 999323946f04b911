"""The parameters of a model after one backward, as every rank sees them and as one knows them of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ...parallel.interop.local_parameters import Gradients, local_gradients
from ...parallel.layout.annotation import Annotation
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.hashing import TensorHash

# How the gradients that ranks have after a backward make up the derivative of the loss, axis by axis ------------------

# Every rank moves its part of a parameter along a direction v and takes the product <g, v> with its own gradient. What
# the loss changes by is then a sum of these products, and which one it is says what the parameter is along an axis:
#
#     along the axis                moved    products              declared
#     a piece                       apart    are summed            P(axis)
#     a copy, complete gradient     alike    are the same          P()
#     a copy, a term of a sum       alike    are summed            P(partial=axis); tied=, between the ranks that hold it
#     one holder                    -        the holder's counts   P(owned={axis: 0})
#     a copy on a data axis         alike    are averaged          P()
#     a piece on a data axis        apart    are averaged          P(axis): experts
#     torch has averaged already    alike    are the same          a DTensor that is replicated over the axis
#                                   apart    are summed            a DTensor that is sharded over it

Sum = Literal["sum", "same", "mean"]


@dataclass(frozen=True)
class Along:
    """Of one axis: whether ranks are moved apart, and what becomes of their products."""

    apart: bool
    products: Sum


COPY, TERM, PIECE = Along(False, "same"), Along(False, "sum"), Along(True, "sum")
AVERAGED, AVERAGED_PIECE = Along(False, "mean"), Along(True, "mean")


@dataclass(frozen=True)
class Way:
    """What a parameter is along each axis that is larger than 1."""

    by_axis: tuple[tuple[str, Along], ...]

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which ranks are moved apart."""
        return tuple(axis for axis, along in self.by_axis if along.apart)

    def along(self, axis: str) -> Along:
        """What it is along one axis."""
        return dict(self.by_axis)[axis]

    def derivative(self, products: Mapping[int, float], topology: Topology) -> tuple[float, float]:
        """What the products by rank make up together, and by how much ranks differ that should have the same.

        Args:
            products: Of all ranks that hold the parameter.
        """
        same = [axis for axis, along in self.by_axis if along.products == "same"]
        divisor = prod(topology.size(axis) for axis, along in self.by_axis if along.products == "mean")
        sums: dict[tuple[int, ...], float] = {}
        for rank, product in products.items():
            where = tuple(topology.coordinate_of(rank, axis) for axis in same)
            sums[where] = sums.get(where, 0.0) + product / divisor
        found = list(sums.values())
        return sum(found) / len(found), max(found) - min(found)


def larger_axes(topology: Topology) -> tuple[str, ...]:
    """Along which something can differ."""
    return tuple(axis for axis in topology.axes if topology.size(axis) > 1)


def declared_way(spec: P, averaged: Iterable[str], topology: Topology) -> Way:
    """What a spec, in the axes of ``topology``, says.

    Args:
        averaged: The axes over which torch averages or sums a DTensor's gradient, which is complete when backward ends.
    """
    averaged = set(averaged)

    def along(axis: str) -> Along:
        apart = axis in spec.sharded_axes
        if axis in averaged:
            return PIECE if apart else TERM if axis in spec.partial else COPY
        if axis in topology.data_axes:
            return AVERAGED_PIECE if apart else AVERAGED
        if axis in topology.pipe_axes and axis not in spec.named_axes:
            return PIECE  # each stage has parameters of its own
        if apart:
            return PIECE
        return TERM if axis in spec.named_axes else COPY

    return Way(tuple((axis, along(axis)) for axis in larger_axes(topology)))


# Measured -------------------------------------------------------------------------------------------------------------


@cache
def _bit_sums(device: torch.device) -> TensorHash:
    return TensorHash(device)


def bits_of(tensor: Tensor) -> int:
    """A number that stands for the bits of a tensor. Host reads: one."""
    with torch._C.DisableTorchFunction():  # of `in_float64`, which would look at each of many small operations
        return int(_bit_sums(tensor.device)([tensor]))


@dataclass(frozen=True)
class ParameterView:
    """One parameter on one rank."""

    shape: tuple[int, ...]
    spec: P | None  # declared, in the axes of the topology
    silent: tuple[str, ...]  # the axes of which nobody has said anything
    averaged: tuple[str, ...]  # the axes over which torch has reduced the gradient
    value: int
    constant: bool
    size: float  # root mean square of the elements
    gradient: float | None  # its norm
    full_shape: tuple[int, ...] | None

    @classmethod
    def of(
        cls, value: Tensor, gradient: Tensor | None, annotation: Annotation | None, topology: Topology
    ) -> ParameterView:
        """Host reads: four."""
        value = value.detach()
        return cls(
            tuple(value.shape),
            None if annotation is None else annotation.spec_on(topology),
            topology.model_axes if annotation is None else annotation.silent_axes(topology),
            () if annotation is None else annotation.mesh_axes_on(topology),
            bits_of(value),
            bool(value.numel() == 0 or (value == value.reshape(-1)[0]).all()),
            float(value.double().square().mean().sqrt()) if value.numel() else 0.0,
            None if gradient is None else float(gradient.double().norm()),
            None if annotation is None else annotation.full_shape,
        )


@dataclass
class KnownParameter:
    """One parameter, as all ranks know it; the same on all of them.

    Args:
        stage: Coordinates along pipeline axes, where stages have other parameters of that name.
        seen: By rank, of those that hold it.
        full: The shape of the logical tensor, where somebody has told it.
    """

    name: str
    stage: tuple[tuple[str, int], ...]
    seen: dict[int, ParameterView]
    full: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """The name, and the stage where that isn't clear."""
        return self.name + "".join(f" ({axis}={index})" for axis, index in self.stage)

    @property
    def module(self) -> str:
        """The name of the module that has it; empty where the model itself does."""
        return self.name.rpartition(".")[0]

    @property
    def first(self) -> ParameterView:
        """On the first rank that holds it."""
        return self.seen[min(self.seen)]

    @property
    def scale(self) -> float:
        """How far elements are moved: as large as they are on average."""
        return max(seen.size for seen in self.seen.values()) or 1.0

    @property
    def effect(self) -> float:
        """How much the loss changes along a direction, on average: the products of a gradient with random elements have the
        size of its norm."""
        return max(seen.gradient or 0.0 for seen in self.seen.values()) * self.scale

    @property
    def constant(self) -> bool:
        """Whether all elements are equal, on all ranks."""
        return all(seen.constant for seen in self.seen.values()) and len({s.value for s in self.seen.values()}) == 1

    def equal_along(self, axis: str, topology: Topology) -> bool:
        """Whether all ranks along the axis that hold it have the same values."""
        groups = ([self.seen[rank] for rank in ranks if rank in self.seen] for ranks in topology.groups(axis))
        return all(len({(one.shape, one.value) for one in group}) <= 1 for group in groups)

    def shared_along(self, axis: str, topology: Topology) -> bool:
        """Whether several ranks of one group along the axis hold it."""
        return any(len([rank for rank in ranks if rank in self.seen]) > 1 for ranks in topology.groups(axis))

    def coordinates(self, axis: str, topology: Topology) -> tuple[int, ...]:
        """Of the ranks that hold it."""
        return tuple(sorted({topology.coordinate_of(rank, axis) for rank in self.seen}))


class Measured:
    """What a backward left on this rank, and what is known of all.

    Args:
        tensors: What is moved, by name: local tensors.
        gradients: Of each, this rank's.
        seen: Of each.
    Collectives: an object all-gather over the world.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor | None],
        seen: Mapping[str, ParameterView],
        registry: ProcessGroupRegistry,
    ) -> None:
        self.topology, self.rank, self.registry = registry.topology, registry.global_rank, registry
        self._tensors, self._gradients = tensors, gradients
        self.known = _known(gather_objects(dict(seen), registry), self.topology)

    @classmethod
    def of_model(cls, model: nn.Module, registry: ProcessGroupRegistry) -> Measured:
        """Its trained parameters. Raises ValueError, TypeError: on every rank, as `local_gradients`."""
        topology = registry.topology
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}

        def see() -> tuple[Gradients, dict[str, ParameterView]]:
            local = local_gradients(list(named.values()), topology)
            seen = {
                name: ParameterView.of(param, gradient, annotation, topology)
                for name, param, gradient, annotation in zip(named, *local, strict=True)
            }
            return local, seen

        local, seen = on_all_ranks(see, registry)
        tensors = dict(zip(named, (param.detach() for param in local.params), strict=True))
        return cls(tensors, dict(zip(named, local.gradients, strict=True)), seen, registry)

    def direction(self, known: KnownParameter, way: Way, seed: int) -> Tensor | None:
        """Of this rank's part, elements of mean square ``known.scale``; equal on ranks that are not moved apart."""
        if self.rank not in known.seen:
            return None
        where = [(axis, self.topology.coordinate_of(self.rank, axis)) for axis in way.apart]
        number = zlib.crc32(repr((seed, known.label, where)).encode())
        generator = torch.Generator().manual_seed(number)
        param = self._tensors[known.name]
        drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64) * known.scale
        return drawn.to(param)

    def products(self, directions: Sequence[tuple[KnownParameter, Tensor | None]]) -> list[dict[int, float]]:
        """<gradient, direction> of each, by rank. Collectives: an object all-gather. Host reads: one a parameter."""
        mine: list[float | None] = []
        for known, direction in directions:
            gradient = None if direction is None else self._gradients[known.name]
            if direction is None:
                mine.append(None)
            else:
                mine.append(0.0 if gradient is None else float((gradient.double() * direction.double()).sum()))
        by_rank = gather_objects(mine, self.registry)
        return [
            {rank: value for rank, value in enumerate(row) if value is not None} for row in zip(*by_rank, strict=True)
        ]

    @torch.no_grad()
    def move(self, directions: Sequence[tuple[KnownParameter, Tensor | None]], step: float) -> dict[str, Tensor]:
        """Move parameters by ``step`` times their directions.

        Returns:
            What they were, for `put_back`.
        """
        before = {}
        for known, direction in directions:
            if direction is not None:
                param = self._tensors[known.name]
                before[known.name] = param.clone()
                param.add_(direction, alpha=step)
        return before

    @torch.no_grad()
    def put_back(self, before: Mapping[str, Tensor]) -> None:
        """Undo a `move`, to the bit."""
        for name, value in before.items():
            self._tensors[name].copy_(value)


def _known(by_rank: Sequence[Mapping[str, ParameterView]], topology: Topology) -> list[KnownParameter]:
    """In the order of the first rank that has each; those of a name on stages that are not tied are several."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], KnownParameter] = {}
    stages: dict[str, set[tuple[int, ...]]] = {}
    for rank, names in enumerate(by_rank):
        at = tuple(topology.coordinate_of(rank, axis) for axis in topology.pipe_axes)
        for name in names:
            stages.setdefault(name, set()).add(at)
    for rank, names in enumerate(by_rank):
        for name, seen in names.items():
            tied = seen.spec is not None and {*dict(seen.spec.tied), *dict(seen.spec.owned)} & {*topology.pipe_axes}
            several = len(stages[name]) > 1 and not tied
            stage = tuple((axis, topology.coordinate_of(rank, axis)) for axis in topology.pipe_axes if several)
            found.setdefault((name, stage), KnownParameter(name, stage, {})).seen[rank] = seen
    return list(found.values())
