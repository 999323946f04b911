"""Results of a proof: the findings by parameter, the proof itself, and the layouts that a parameter may have.

All values are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from ...parallel.layout.spec import P
from ...parallel.mesh.topology import Topology
from .measured import (
    AVERAGED,
    AVERAGED_PIECE,
    COPY,
    PIECE,
    TERM,
    AxisContract,
    GradientContract,
    KnownParameter,
    larger_axes,
)

Cause = Literal[
    "split, not declared",
    "declared split, but a copy",
    "a sum is missing",
    "counted several times",
    "divided too often",
    "added on every rank",
    "held by others",
    "no gradient comes",
    "copies differ",
    "backward is wrong",
    "forward differs",
]


@dataclass(frozen=True)
class Finding:
    """A parameter whose gradient, completed as its layout declares, is not the derivative of the loss.

    Args:
        name: Name of the parameter, followed by its pipeline stage if several stages use the name for different
            parameters.
        module: Name of the module that holds the parameter.
        declared: The declared spec; None if the parameter has none.
        inferred: The spec that would make the gradient right; None if no layout does.
        cause: The kind of mistake.
        axes: The mesh axes along which it happens.
        factor: Factor by which the gradient is too large; None if the gradient is not a multiple of the right one.
        text: Description of the most likely mistake.
    """

    name: str
    module: str
    declared: P | None
    inferred: P | None
    cause: Cause
    axes: tuple[str, ...]
    factor: float | None
    text: str

    def __str__(self) -> str:
        declared = "" if self.declared is None else f"declared {self.declared}, but "
        return f"{self.name}: {declared}{self.text}"


@dataclass(frozen=True)
class Proof:
    """Result of `prove`, the same on all ranks.

    Args:
        proved: Names of the parameters whose gradients are the derivative of the loss.
        untold: Names of the parameters that were not decided: the loss hardly depends on them, or they were left out.
        findings: One finding per wrong parameter, in forward order.
        where: Description of the module whose backward is wrong; None if it was not located.
        forwards: Number of forwards of the model.
    """

    proved: tuple[str, ...]
    untold: tuple[str, ...]
    findings: tuple[Finding, ...]
    where: str | None
    forwards: int

    @property
    def right(self) -> bool:
        """Return True if there are no findings."""
        return not self.findings

    def check(self) -> None:
        """Raise AssertionError with the text of all findings if there are any."""
        if self.findings:
            raise AssertionError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, with specs as text."""
        values = asdict(self)
        for finding, one in zip(values["findings"], self.findings, strict=True):
            finding.update(
                declared=None if one.declared is None else repr(one.declared),
                inferred=None if one.inferred is None else repr(one.inferred),
            )
        return values | {"right": self.right}

    def __str__(self) -> str:
        summary = f"{len(self.proved)} parameters are right, in {self.forwards} forwards"
        untold = f"; not decided: {', '.join(self.untold)}" if self.untold else ""
        if self.right:
            return summary + untold
        wrong = [str(finding) for finding in self.findings]
        where = [self.where] if self.where else []
        count = "1 parameter is wrong" if len(wrong) == 1 else f"{len(wrong)} parameters are wrong"
        return "\n".join([f"{count}:", *wrong, *where, f"The other {summary}{untold}"])


# Conversion of a gradient contract to a spec for `declare` ------------------------------------------------------------

Shape = tuple[int, ...]
Beside = Mapping[str, tuple[Shape, bool]]


def spec_of_contract(
    known: KnownParameter, contract: GradientContract, topology: Topology, beside: Beside
) -> tuple[P, bool]:
    """Return the spec for a contract, and whether its sharded dims are certain.

    The gradient norm and the step are right in either case; only a checkpoint for other layouts depends on the dims.

    Args:
        known: The parameter.
        contract: How the ranks' gradients make up the derivative.
        topology: The mesh.
        beside: For each other parameter of the same module, by name: its local shape, and whether it is sharded over
            the same axes.
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


def cutting_axes(known: KnownParameter, contract: GradientContract, topology: Topology) -> list[str]:
    """Return the axes that shard a dim.

    These are all axes with distinct shards, except pipeline axes and one axis of each diagonal.
    """
    diagonals = dict(_diagonals(known, contract, topology))
    return [axis for axis in contract.apart if axis not in topology.pipe_axes and axis not in diagonals]


def _diagonals(known: KnownParameter, contract: GradientContract, topology: Topology) -> Iterator[tuple[str, str]]:
    """Yield (axis, axis of the owner's coordinate) for ranks that hold the parameter on a diagonal of two axes only."""
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
    """Return the sharding axes of each dim, and whether they are certain."""
    shape = known.first.shape
    dims = len(shape)
    if not cutting:
        return [], True
    fitting = list(cuts_that_fit(known, cutting, topology))
    is_certain = len(fitting) == 1
    if not is_certain and known.full is None and dims == 2 and len(cutting) == 1:
        # In nn.Linear, dim 0 is the output features: it is sharded exactly if a bias of as many elements is sharded too.
        biases = [cut for length, cut in beside.values() if length == shape[:1]]
        if biases:
            fitting, is_certain = [(0,) if biases[0] else (1,)], True
    chosen = fitting[0] if fitting else (0,) * len(cutting)
    entries = [tuple(axis for axis, at in zip(cutting, chosen, strict=True) if at == dim) for dim in range(dims)]
    return entries, is_certain


def cuts_that_fit(known: KnownParameter, cutting: Sequence[str], topology: Topology) -> Iterator[tuple[int, ...]]:
    """Yield the possible choices of one sharded dim per axis.

    A choice fits if it turns the full shape into the largest local shape. Every choice fits if the full shape is not
    known.
    """
    for dims in product(range(len(known.first.shape)), repeat=len(cutting)):
        parts = [
            prod(topology.size(axis) for axis, at in zip(cutting, dims, strict=True) if at == dim)
            for dim in range(len(known.first.shape))
        ]
        largest = [max(lengths) for lengths in zip(*(seen.shape for seen in known.seen.values()), strict=True)]
        whole = zip(known.full or (), parts, strict=True) if known.full is not None else None
        if whole is None or [-(-length // by) for length, by in whole] == largest:
            yield dims


# Candidates -----------------------------------------------------------------------------------------------------------

# The contracts that a parameter may have, given which ranks hold it and whether their values are equal.


def candidates(
    known: KnownParameter, topology: Topology, split: Sequence[str], first: GradientContract | None
) -> Iterator[GradientContract]:
    """Yield every contract that the values allow, the most likely one first.

    Args:
        known: The parameter.
        topology: The mesh.
        split: The axes that certainly shard another parameter of the same module. They decide for constant values,
            which can belong to shards or to replicas with partial gradients.
        first: Yielded before all others: the declared contract. None: there is none.
    """
    if first is not None:
        yield first
    axes = larger_axes(topology)
    choices = [_along(known, axis, topology, axis in split) for axis in axes]
    # The optimizer averages gradients over data axes, so a deviation is more likely along another axis of the same size.
    odd = [axis in topology.data_axes for axis in axes]
    for chosen in sorted(product(*map(range, map(len, choices))), key=lambda chosen: _count(chosen, odd)):
        contract = GradientContract(
            tuple((axis, choice[at]) for axis, choice, at in zip(axes, choices, chosen, strict=True))
        )
        cutting = cutting_axes(known, contract, topology)
        if contract != first and (known.full is None or any(True for _ in cuts_that_fit(known, cutting, topology))):
            yield contract


def _count(chosen: Sequence[int], odd: Sequence[bool]) -> int:
    return sum(1 for at, counts in zip(chosen, odd, strict=True) if at and counts)


def _along(known: KnownParameter, axis: str, topology: Topology, split: bool) -> tuple[AxisContract, ...]:
    if len(known.coordinates(axis, topology)) == 1:
        return (AVERAGED_PIECE, TERM) if axis in topology.data_axes else (TERM,)  # a single rank holds the parameter
    if not known.shared_along(axis, topology) or not known.equal_along(axis, topology):
        return (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    alike: tuple[AxisContract, ...] = (AVERAGED, COPY, TERM) if axis in topology.data_axes else (COPY, TERM)
    if not known.constant:
        return alike
    pieces = (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    return (*pieces, *alike) if split or known.full is not None else (*alike, *pieces)


def split_beside(known: KnownParameter, everything: Sequence[KnownParameter], topology: Topology) -> tuple[str, ...]:
    """Return the axes along which another parameter of the same module is sharded.

    Several ranks hold that parameter with unequal values.
    """
    beside = [
        other
        for other in everything
        if other is not known and other.module == known.module and other.stage == known.stage
    ]
    return tuple(
        axis for axis in larger_axes(topology) if any(not other.equal_along(axis, topology) for other in beside)
    )
