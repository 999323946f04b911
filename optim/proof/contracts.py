"""Gradient contracts of parameters, the rules that compute the derivative of the loss from the ranks' gradients.

A contract is made from a declared spec, or from the values of a parameter on all ranks after one backward. It can be
converted to a spec. Contracts and `KnownParameter` objects are the same on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...parallel.interop.audit import hints_of_equal_stages, tied_names
from ...parallel.interop.local_parameters import local_gradients
from ...parallel.layout.annotation import Annotation
from ...parallel.layout.spec import P
from ...parallel.mesh.agreement import gather_objects, on_all_ranks
from ...parallel.mesh.registry import ProcessGroupRegistry
from ...parallel.mesh.topology import Topology
from ..norm.replicas import TensorHash

# Gradient contracts, axis by axis -------------------------------------------------------------------------------------

# The loss is differentiated along a direction v of a parameter: a tensor of the parameter's shape. Each rank computes
# the product <g, v> of its gradient and its part of v. The layout along each mesh axis determines whether the ranks'
# parts of v are equal or distinct, and how the derivative of the loss follows from the ranks' products:
#
#     layout along the axis         directions  products             declared as
#     sharded                       distinct    are summed           P(axis)
#     replicated, full gradient     equal       are equal            P()
#     replicated, partial gradient  equal       are summed           P(partial=axis), or tied= for some of its ranks
#     on one rank only              -           only one exists      P(owned={axis: 0})
#     replicated, data axis         equal       are averaged         P()
#     sharded, data axis            distinct    are averaged         P(axis), as for experts
#     DTensor, replicated           equal       are equal            its placements; torch has reduced the gradient
#     DTensor, sharded              distinct    are summed           its placements; torch has reduced the gradient
#     pipeline axis, not in P       distinct    are summed           nothing: each stage has different parameters

Sum = Literal["sum", "same", "mean"]


@dataclass(frozen=True)
class AxisContract:
    """Rule that computes the derivative of the loss from a parameter's gradients on the ranks of one mesh axis.

    ``apart``: the ranks hold shards, so their parts of a direction are distinct; else replicas, with equal directions.
    ``products``: the derivative is the "sum" or the "mean" of the ranks' products, or the product itself ("same"),
    which must be equal on all ranks.
    """

    apart: bool
    products: Sum


COPY, TERM, PIECE = AxisContract(False, "same"), AxisContract(False, "sum"), AxisContract(True, "sum")
AVERAGED, AVERAGED_PIECE = AxisContract(False, "mean"), AxisContract(True, "mean")


@dataclass(frozen=True)
class GradientContract:
    """Rule that computes the derivative of the loss from a parameter's gradients on all ranks."""

    by_axis: tuple[tuple[str, AxisContract], ...]

    @property
    def apart(self) -> tuple[str, ...]:
        """Return the axes along which ranks hold distinct shards of the parameter."""
        return tuple(axis for axis, along in self.by_axis if along.apart)

    def along(self, axis: str) -> AxisContract:
        """Return the contract along ``axis``, which must be larger than 1."""
        return dict(self.by_axis)[axis]

    def derivative(self, products: Mapping[int, float], topology: Topology) -> tuple[float, float]:
        """Return (derivative of the loss along a direction, spread), from the products <gradient, direction> of all ranks.

        ``products`` has one entry per rank that holds the parameter. If the contract requires equal results on some
        ranks, the derivative is their mean, and the spread is the largest difference between two of these results.
        """
        same = [axis for axis, along in self.by_axis if along.products == "same"]
        divisor = prod(topology.size(axis) for axis, along in self.by_axis if along.products == "mean")
        sums: dict[tuple[int, ...], float] = {}
        for rank, value in products.items():
            where = tuple(topology.coordinate_of(rank, axis) for axis in same)
            sums[where] = sums.get(where, 0.0) + value / divisor
        found = list(sums.values())
        return sum(found) / len(found), max(found) - min(found)


def larger_axes(topology: Topology) -> tuple[str, ...]:
    return tuple(axis for axis in topology.axes if topology.size(axis) > 1)


def declared_contract(spec: P, averaged: Iterable[str], topology: Topology) -> GradientContract:
    """Return the gradient contract of a parameter with the layout ``spec``.

    ``averaged`` are the mesh axes of a DTensor, over which torch reduces its gradient in backward; else empty.
    """
    averaged = set(averaged)

    def along(axis: str) -> AxisContract:
        apart = axis in spec.sharded_axes
        if axis in averaged:
            return PIECE if apart else TERM if axis in spec.partial else COPY
        if axis in topology.data_axes:
            return AVERAGED_PIECE if apart else AVERAGED
        if axis in topology.pipe_axes and axis not in spec.named_axes:
            return PIECE  # each stage has different parameters
        if apart:
            return PIECE
        return TERM if axis in spec.named_axes else COPY

    return GradientContract(tuple((axis, along(axis)) for axis in larger_axes(topology)))


# The parameters after one backward: the values on each rank, and their description on all ranks -----------------------


@cache
def _bit_sums(device: torch.device) -> TensorHash:
    return TensorHash(device)


def bits_of(tensor: Tensor) -> int:
    """Return a hash of the elements of a tensor. All NaNs count as equal, and -0 equals 0, except in 8-bit floats.

    Host synchronization: one if the tensor is on a GPU.
    """
    with torch._C.DisableTorchFunction():  # avoids the overhead of `in_float64` on many small operations
        return int(_bit_sums(tensor.device)([tensor]))


@dataclass(frozen=True)
class ParameterView:
    """Description of one parameter and its gradient on one rank, without the tensors."""

    shape: tuple[int, ...]
    spec: P | None  # declared spec, in the axes of the topology; None if not declared
    averaged: tuple[str, ...]  # mesh axes of a DTensor, over which torch reduces its gradient; else empty
    value: int  # hash of the elements, from `bits_of`
    constant: bool  # True if all elements are equal
    size: float  # root mean square of the elements
    gradient: float | None  # L2 norm of the gradient; None without a gradient

    @classmethod
    def of(
        cls, value: Tensor, gradient: Tensor | None, annotation: Annotation | None, topology: Topology
    ) -> ParameterView:
        """Return the description of a parameter and its gradient on this rank.

        Host synchronization: up to four if the tensors are on a GPU.
        """
        value = value.detach()
        return cls(
            tuple(value.shape),
            None if annotation is None else annotation.spec_on(topology),
            () if annotation is None else annotation.mesh_axes_on(topology),
            bits_of(value),
            bool(value.numel() == 0 or (value == value.reshape(-1)[0]).all()),
            float(value.double().square().mean().sqrt()) if value.numel() else 0.0,
            None if gradient is None else float(gradient.double().norm()),
        )


@dataclass
class KnownParameter:
    """Description of one logical parameter: its values and gradients on all ranks. It is equal on every rank.

    ``stage`` has (pipeline axis, coordinate) pairs if several stages use the name for different parameters; else it is
    empty. ``seen`` has one entry per rank that holds the parameter. ``full`` is the full shape; None: not known.
    ``names`` has the names on the ranks on which a tied parameter has another name.
    """

    name: str
    stage: tuple[tuple[str, int], ...]
    seen: dict[int, ParameterView]
    full: tuple[int, ...] | None = None
    names: dict[int, str] = field(default_factory=dict)

    def name_on(self, rank: int) -> str:
        """Return the name of the parameter on a rank that holds it."""
        return self.names.get(rank, self.name)

    @property
    def label(self) -> str:
        """Return the name, followed by the stage if several stages use the name for different parameters."""
        return self.name + "".join(f" ({axis}={index})" for axis, index in self.stage)

    @property
    def module(self) -> str:
        """Return the name of the module that holds the parameter; empty for the model itself."""
        return self.name.rpartition(".")[0]

    @property
    def first(self) -> ParameterView:
        """Return the description on the lowest rank that holds the parameter."""
        return self.seen[min(self.seen)]

    @property
    def scale(self) -> float:
        """Return the size of the elements: the largest root mean square of a rank's shard, or 1 if that is 0.

        `Measured.direction` draws random directions with this standard deviation.
        """
        return max(seen.size for seen in self.seen.values()) or 1.0

    @property
    def effect(self) -> float:
        """Return the expected size of the derivative of the loss along a random direction."""
        return max(seen.gradient or 0.0 for seen in self.seen.values()) * self.scale

    @property
    def constant(self) -> bool:
        """Return True if all elements on all ranks have the same value.

        Return False if shards have different sizes, and so different hashes, except for shards of zeros.
        """
        return all(seen.constant for seen in self.seen.values()) and len({s.value for s in self.seen.values()}) == 1

    def equal_along(self, axis: str, topology: Topology) -> bool:
        """Return True if ranks that hold the parameter and differ only along ``axis`` have equal values of it."""
        groups = ([self.seen[rank] for rank in ranks if rank in self.seen] for ranks in topology.groups(axis))
        return all(len({(one.shape, one.value) for one in group}) <= 1 for group in groups)

    def shared_along(self, axis: str, topology: Topology) -> bool:
        """Return True if, in some group of ranks along ``axis``, more than one rank holds the parameter."""
        return any(len([rank for rank in ranks if rank in self.seen]) > 1 for ranks in topology.groups(axis))

    def coordinates(self, axis: str, topology: Topology) -> tuple[int, ...]:
        """Return the coordinates along ``axis`` at which ranks hold the parameter."""
        return tuple(sorted({topology.coordinate_of(rank, axis) for rank in self.seen}))


class LocalTensor(NamedTuple):
    """This rank's shard of a parameter, and its gradient after the backward; None without a gradient."""

    value: Tensor
    gradient: Tensor | None


Directions = Sequence[tuple[KnownParameter, "Tensor | None"]]
"""Pairs of a parameter and this rank's part of a direction, in the same order on all ranks.

The direction is None if this rank does not hold the parameter."""


class Measured:
    """This rank's parameters and gradients after a backward, and descriptions of the parameters of all ranks.

    All mappings are by name. `move` changes the values in ``local`` in place. ``topology`` has the axes of the
    registry's topology, perhaps with other roles. `known` has one `KnownParameter` per logical parameter of the model,
    in the same order on all ranks.

    Collectives: an object all-gather over the world.
    """

    def __init__(
        self,
        local: Mapping[str, LocalTensor],
        seen: Mapping[str, ParameterView],
        registry: ProcessGroupRegistry,
        topology: Topology,
    ) -> None:
        self.topology, self.rank, self.registry = topology, registry.global_rank, registry
        self._local = local
        self.known = _known(gather_objects(seen, registry), self.topology)

    @classmethod
    def of_model(cls, model: nn.Module, registry: ProcessGroupRegistry, topology: Topology) -> Measured:
        """Return the `Measured` of a model's trainable parameters and their gradients in ``.grad``.

        Collectives: two object all-gathers over the world.
        Host synchronization: several per parameter if the parameters are on a GPU.
        """
        named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        local, seen = dict[str, LocalTensor](), dict[str, ParameterView]()

        def see() -> None:
            found = local_gradients(list(named.values()), topology)
            for name, param, gradient, annotation in zip(named, *found[:3], strict=True):
                local[name] = LocalTensor(param.detach(), gradient)
                seen[name] = ParameterView.of(param, gradient, annotation, topology)

        on_all_ranks(see, registry)
        return cls(local, seen, registry, topology)

    def direction(self, known: KnownParameter, contract: GradientContract, seed: int) -> Tensor | None:
        """Return this rank's part of a random direction of a parameter; None if this rank does not hold the parameter.

        The elements are normal random numbers with standard deviation ``known.scale``. Ranks at different coordinates
        along an axis in ``contract.apart`` get distinct parts. Along other axes, all ranks get the same part.
        """
        if self.rank not in known.seen:
            return None
        where = [(axis, self.topology.coordinate_of(self.rank, axis)) for axis in contract.apart]
        number = zlib.crc32(repr((seed, known.label, where)).encode())
        generator = torch.Generator().manual_seed(number)
        param = self._local[known.name_on(self.rank)].value
        drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64) * known.scale
        return drawn.to(param)

    def products(self, directions: Directions) -> dict[str, dict[int, float]]:
        """Return {label of a parameter: {rank: product <gradient, direction> of this rank}}.

        Ranks that do not hold the parameter are left out. The product of a missing gradient is 0.

        Collectives: an object all-gather.
        Host synchronization: one per parameter on a GPU.
        """
        own: dict[str, float] = {}
        for known, direction in directions:
            if direction is not None:
                gradient = self._local[known.name_on(self.rank)].gradient
                own[known.label] = 0.0 if gradient is None else float((gradient.double() * direction.double()).sum())
        by_rank = gather_objects(own, self.registry)
        labels = [known.label for known, _ in directions]
        return {label: {rank: found[label] for rank, found in enumerate(by_rank) if label in found} for label in labels}

    @torch.no_grad()
    def move(self, directions: Directions, step: float) -> dict[str, Tensor]:
        """Add ``step`` times its direction to each parameter in place. Return the old values by name, for `put_back`."""
        before = {}
        for known, direction in directions:
            if direction is not None:
                name = known.name_on(self.rank)
                param = self._local[name].value
                before[name] = param.clone()
                param.add_(direction, alpha=step)
        return before

    @torch.no_grad()
    def put_back(self, before: Mapping[str, Tensor]) -> None:
        """Copy ``before``, the values that `move` returned, back into the parameters."""
        for name, value in before.items():
            self._local[name].value.copy_(value)


def _known(by_rank: Sequence[Mapping[str, ParameterView]], topology: Topology) -> list[KnownParameter]:
    """Return one `KnownParameter` per logical parameter, from the descriptions of all ranks.

    Parameters with equal names on several pipeline stages are different, unless their spec ties them over the pipeline
    axis. Tied parameters may have different names (`tied_names`). The parameters of rank 0 come first, then the
    parameters of rank 1 that rank 0 does not have, and so on.
    """
    common = tied_names([{name: seen.spec for name, seen in names.items()} for names in by_rank], topology)
    found: dict[tuple[str, tuple[tuple[str, int], ...]], KnownParameter] = {}
    stages: dict[str, set[tuple[int, ...]]] = {}
    for rank, names in enumerate(by_rank):
        at = tuple(topology.coordinate_of(rank, axis) for axis in topology.pipe_axes)
        for name in names:
            stages.setdefault(name, set()).add(at)
    for rank, names in enumerate(by_rank):
        for name, seen in names.items():
            tied = seen.spec is not None and {*dict(seen.spec.tied)} & {*topology.pipe_axes}
            several = len(stages[name]) > 1 and not tied
            stage = tuple((axis, topology.coordinate_of(rank, axis)) for axis in topology.pipe_axes if several)
            shared = common[rank].get(name, name)
            known = found.setdefault((shared, stage), KnownParameter(shared, stage, {}))
            known.seen[rank] = seen
            if shared != name:
                known.names[rank] = name
    return list(found.values())


def hints_of_undeclared_ties(known: Sequence[KnownParameter], topology: Topology) -> tuple[str, ...]:
    """Return texts that name parameters of different pipeline stages with equal values (`hints_of_equal_stages`)."""
    values: list[dict[str, tuple[Shape, int]]] = [{} for _ in range(topology.world_size)]
    for one in known:
        for rank, seen in one.seen.items():
            named = () if seen.spec is None else seen.spec.named_axes
            if not seen.constant and not {*named} & {*topology.pipe_axes}:
                values[rank][one.name_on(rank)] = seen.shape, seen.value
    return hints_of_equal_stages(values, topology)


# Conversion of a gradient contract to a spec for `declare` ------------------------------------------------------------

Shape = tuple[int, ...]
Beside = Mapping[str, tuple[Shape, bool]]


def spec_of_contract(
    known: KnownParameter, contract: GradientContract, topology: Topology, beside: Beside
) -> tuple[P, bool]:
    """Return (spec with the given gradient contract, True if its sharded dims are certain).

    The contract says along which axes the ranks hold shards. It does not determine which dims are sharded. If several
    choices are possible, the spec has one of them. The gradient norm and the step of an elementwise optimizer are right
    with each choice. Full-tensor optimizers (such as `Muon`), norms per row, and loading a checkpoint in another layout
    depend on the choice. For a 2-dim weight whose full shape is not known, the choice depends on ``beside``: {name:
    (local shape, True if sharded over the same axes)} of the other parameters of the same module.
    """
    partial, owned, tied = [], dict[str, int | str](), dict[str, tuple[int, ...]]()
    for axis, along in contract.by_axis:
        held = known.coordinates(axis, topology)
        if along.apart:
            continue
        if len(held) == 1:
            if axis not in topology.pipe_axes:
                owned[axis] = held[0]
        elif len(held) < topology.size(axis) or (axis in topology.pipe_axes and along.products == "sum"):
            tied[axis] = held
        elif along.products == "sum" and axis not in topology.data_axes:
            partial.append(axis)
    owned |= dict(_diagonals(known, contract, topology))
    entries, is_certain = _entries(known, cutting_axes(known, contract, topology), topology, beside)
    return P(*entries, partial=tuple(partial), owned=owned, tied=tied), is_certain


def parameters_beside(
    known: KnownParameter, every: Sequence[KnownParameter], contracts: Mapping[str, GradientContract]
) -> Beside:
    """Return ``beside`` of `spec_of_contract` for the parameter.

    Args:
        every: The checked parameters.
        contracts: The gradient contract of each of them by label; parameters without one are left out.
    """
    contract = contracts[known.label]
    return {
        other.name: (other.first.shape, contracts[other.label].apart == contract.apart)
        for other in every
        if other is not known and other.module == known.module and other.label in contracts
    }


def cutting_axes(known: KnownParameter, contract: GradientContract, topology: Topology) -> list[str]:
    """Return the axes that shard a dim of the parameter.

    If only ranks with equal coordinates along two axes hold the parameter, only one of these two axes is returned.
    """
    diagonals = dict(_diagonals(known, contract, topology))
    return [axis for axis in contract.apart if axis not in topology.pipe_axes and axis not in diagonals]


def _diagonals(known: KnownParameter, contract: GradientContract, topology: Topology) -> Iterator[tuple[str, str]]:
    """Yield each (axis, other axis) for which only ranks with equal coordinates along both axes hold the parameter.

    The owner along ``axis`` is then the rank whose coordinate along ``axis`` equals its coordinate along the other axis.
    """
    done: set[str] = set()
    cutting = [axis for axis in contract.apart if axis not in topology.pipe_axes]
    for other in cutting:
        for axis in cutting:
            pairs = {(topology.coordinate_of(rank, axis), topology.coordinate_of(rank, other)) for rank in known.seen}
            if axis != other and not {axis, other} & done and all(a == b for a, b in pairs):
                done |= {axis, other}
                yield axis, other


def _entries(
    known: KnownParameter, cutting: Sequence[str], topology: Topology, beside: Beside
) -> tuple[list[tuple[str, ...]], bool]:
    """Return (per dim, the axes that shard it; True if this choice of dims is certain)."""
    shape = known.first.shape
    dims = len(shape)
    if not cutting:
        return [], True
    fitting = list(cuts_that_fit(known, cutting, topology))
    is_certain = len(fitting) == 1
    if not is_certain and known.full is None and dims == 2 and len(cutting) == 1:
        # In nn.Linear, dim 0 of the weight is the output features. It is sharded exactly if the bias, which has one
        # element per output feature, is sharded.
        biases = [cut for length, cut in beside.values() if length == shape[:1]]
        if biases:
            fitting, is_certain = [{cutting[0]: 0 if biases[0] else 1}], True
    chosen = fitting[0] if fitting else dict.fromkeys(cutting, 0)
    return [tuple(axis for axis, at in chosen.items() if at == dim) for dim in range(dims)], is_certain


def cuts_that_fit(known: KnownParameter, cutting: Sequence[str], topology: Topology) -> Iterator[dict[str, int]]:
    """Yield the possible choices of a sharded dim for each axis in ``cutting``, as dicts {axis: dim}.

    A choice is possible if it divides the full shape into shards of the largest shape that a rank holds. If the full
    shape is not known, every choice is possible.
    """
    dims, full = range(len(known.first.shape)), known.full
    largest = [max(seen.shape[dim] for seen in known.seen.values()) for dim in dims]
    for choice in product(dims, repeat=len(cutting)):
        cut = dict(zip(cutting, choice, strict=True))
        parts = [prod(topology.size(axis) for axis, at in cut.items() if at == dim) for dim in dims]
        if full is None or (len(full) == len(parts) and all(-(-full[d] // parts[d]) == largest[d] for d in dims)):
            yield cut


# Candidates -----------------------------------------------------------------------------------------------------------


def candidates(
    known: KnownParameter, topology: Topology, split: Sequence[str], first: GradientContract | None
) -> Iterator[GradientContract]:
    """Yield every gradient contract that the parameter's values allow, the most likely contract first.

    ``split`` are the axes that certainly shard another parameter of the same module. If all elements of this parameter
    are equal, it may be sharded or replicated. Along the axes in ``split``, it is then more likely sharded. If its full
    shape is known, it is more likely sharded along every axis.

    ``first`` is yielded first, even if the values do not allow it.
    """
    if first is not None:
        yield first
    choices = []
    for axis in larger_axes(topology):
        # A deviation from the first option is less likely along a data axis, because the optimizer averages over data
        # axes by itself. This matters for axes of equal size, because the values may then fit several contracts.
        is_data = axis in topology.data_axes
        options = enumerate(_along(known, axis, topology, axis in split))
        choices.append([(axis, along, is_data and at > 0) for at, along in options])
    for chosen in sorted(product(*choices), key=lambda chosen: sum(is_unlikely for _, _, is_unlikely in chosen)):
        contract = GradientContract(tuple((axis, along) for axis, along, _ in chosen))
        cutting = cutting_axes(known, contract, topology)
        if contract != first and (known.full is None or any(True for _ in cuts_that_fit(known, cutting, topology))):
            yield contract


def _along(known: KnownParameter, axis: str, topology: Topology, split: bool) -> tuple[AxisContract, ...]:
    if len(known.coordinates(axis, topology)) == 1:
        return (AVERAGED_PIECE, TERM) if axis in topology.data_axes else (TERM,)  # held at one coordinate of the axis
    if not known.shared_along(axis, topology) or not known.equal_along(axis, topology):
        return (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    alike: tuple[AxisContract, ...] = (AVERAGED, COPY, TERM) if axis in topology.data_axes else (COPY, TERM)
    if not known.constant:
        return alike
    pieces = (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    return (*pieces, *alike) if split or known.full is not None else (*alike, *pieces)


def split_beside(known: KnownParameter, everything: Sequence[KnownParameter], topology: Topology) -> tuple[str, ...]:
    """Return the axes along which another parameter of the same module has unequal values and so must be sharded."""
    beside = [
        other
        for other in everything
        if other is not known and other.module == known.module and other.stage == known.stage
    ]
    return tuple(
        axis for axis in larger_axes(topology) if any(not other.equal_along(axis, topology) for other in beside)
    )
