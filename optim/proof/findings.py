"""What was found of each parameter, and of a model: values that all ranks share, as text, as a table, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from ...parallel.layout.spec import P
from ...parallel.mesh.topology import Topology
from .measured import AVERAGED, AVERAGED_PIECE, COPY, PIECE, TERM, Along, KnownParameter, Way, larger_axes

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
    """One parameter whose gradient, as it is declared, is not the derivative of the loss.

    Args:
        name: Of the parameter; with the stage, where stages have others of that name.
        module: That has it.
        declared: None where nothing is.
        inferred: What it is instead; None where no layout makes its gradient right.
        cause: The kind of mistake.
        axes: Along which axes.
        factor: How many times too large the gradient is, where it is only that.
        text: The likely mistake, in words.
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
        declared = "" if self.declared is None else f"declared {self.declared}, "
        return f"{self.name}: {declared}{self.text}"


@dataclass(frozen=True)
class Proof:
    """What `prove` found, the same on all ranks.

    Args:
        proved: The parameters whose gradients are the derivative of the loss, as declared.
        untold: Those of which nothing can be said: the loss hardly depends on them, or they were left out.
        findings: All others, in forward order.
        where: Which module's backward is wrong, where that could be told.
        forwards: How often the model was run.
    """

    proved: tuple[str, ...]
    untold: tuple[str, ...]
    findings: tuple[Finding, ...]
    where: str | None
    forwards: int

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.findings

    def check(self) -> None:
        """Raises AssertionError with all that was found, where something is wrong."""
        if self.findings:
            raise AssertionError(str(self))

    def to_json(self) -> dict[str, Any]:
        """Plain values, specs as text."""
        values = asdict(self)
        for finding, one in zip(values["findings"], self.findings, strict=True):
            finding.update(
                declared=None if one.declared is None else repr(one.declared),
                inferred=None if one.inferred is None else repr(one.inferred),
            )
        return values | {"right": self.right}

    def __str__(self) -> str:
        told = f"{len(self.proved)} parameters are right, in {self.forwards} forwards"
        untold = f"; nothing can be said of {', '.join(self.untold)}" if self.untold else ""
        if self.right:
            return told + untold
        wrong = [str(finding) for finding in self.findings]
        where = [self.where] if self.where else []
        count = "1 parameter is wrong" if len(wrong) == 1 else f"{len(wrong)} parameters are wrong"
        return "\n".join([f"{count}:", *wrong, *where, f"The other {told}{untold}"])


# The spec that says what was found of a parameter, ready for `declare` ------------------------------------------------

Shape = tuple[int, ...]
Beside = Mapping[str, tuple[Shape, bool]]


def spec_of_way(known: KnownParameter, way: Way, topology: Topology, beside: Beside) -> tuple[P, bool]:
    """The spec, and whether it is told which dims are cut; the norm and the step are right in either case.

    Args:
        beside: Of the other parameters of its module the local shape, and whether they are cut over the same axes.
    """
    partial, owned, tied = [], dict[str, int | str](), dict[str, tuple[int, ...]]()
    for axis, along in way.by_axis:
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
    owned |= dict(_diagonals(known, way, topology))
    entries, told = _entries(known, cutting_axes(known, way, topology), topology, beside)
    return P(*entries, partial=tuple(partial), owned=owned, tied=tied), told


def cutting_axes(known: KnownParameter, way: Way, topology: Topology) -> list[str]:
    """The axes that cut a dim: those along which ranks are moved apart, but for stages, and one of those of a diagonal."""
    diagonals = dict(_diagonals(known, way, topology))
    return [axis for axis in way.apart if axis not in topology.pipe_axes and axis not in diagonals]


def _diagonals(known: KnownParameter, way: Way, topology: Topology) -> Iterator[tuple[str, str]]:
    """(axis, the axis whose coordinate is the owner's) where holders lie on a diagonal."""
    done: set[str] = set()
    cutting = [axis for axis in way.apart if axis not in topology.pipe_axes]
    for other in cutting:
        for axis in cutting:
            pairs = {(topology.coordinate_of(rank, axis), topology.coordinate_of(rank, other)) for rank in known.seen}
            if axis != other and not {axis, other} & done and all(a == b for a, b in pairs):
                done |= {axis, other}
                yield axis, other


def _entries(
    known: KnownParameter, cutting: Sequence[str], topology: Topology, beside: Beside
) -> tuple[list[tuple[str, ...]], bool]:
    """Of each dim the axes that cut it, and whether that is told."""
    shape = known.first.shape
    dims = len(shape)
    if not cutting:
        return [], True
    fitting = list(cuts_that_fit(known, cutting, topology))
    told = len(fitting) == 1
    if not told and known.full is None and dims == 2 and len(cutting) == 1:
        # As in nn.Linear, dim 0 makes the output features: a bias of as many elements is cut where it is, or whole.
        biases = [cut for length, cut in beside.values() if length == shape[:1]]
        if biases:
            fitting, told = [(0,) if biases[0] else (1,)], True
    chosen = fitting[0] if fitting else (0,) * len(cutting)
    entries = [tuple(axis for axis, at in zip(cutting, chosen, strict=True) if at == dim) for dim in range(dims)]
    return entries, told


def cuts_that_fit(known: KnownParameter, cutting: Sequence[str], topology: Topology) -> Iterator[tuple[int, ...]]:
    """For each of the axes the dim that it may cut, by the shape of the logical tensor: all dims where that is unknown."""
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

# What a parameter may be along its axes, by who holds it and whether their values are equal, the likeliest first.


def candidates(known: KnownParameter, topology: Topology, split: Sequence[str], first: Way | None) -> Iterator[Way]:
    """Every way that the values leave open.

    Args:
        split: The axes that certainly split another parameter of the same module; where values are constant, and don't
            tell a piece from a term of a sum, it is then the piece that is likelier.
        first: Tried first: what is declared.
    """
    if first is not None:
        yield first
    axes = larger_axes(topology)
    choices = [_along(known, axis, topology, axis in split) for axis in axes]
    # What is odd along a data axis, whose gradients the optimizer averages, is likelier so along another of its size.
    odd = [axis in topology.data_axes for axis in axes]
    for chosen in sorted(product(*map(range, map(len, choices))), key=lambda chosen: _count(chosen, odd)):
        way = Way(tuple((axis, choice[at]) for axis, choice, at in zip(axes, choices, chosen, strict=True)))
        cutting = cutting_axes(known, way, topology)
        if way != first and (known.full is None or any(True for _ in cuts_that_fit(known, cutting, topology))):
            yield way


def _count(chosen: Sequence[int], odd: Sequence[bool]) -> int:
    return sum(1 for at, counts in zip(chosen, odd, strict=True) if at and counts)


def _along(known: KnownParameter, axis: str, topology: Topology, split: bool) -> tuple[Along, ...]:
    if len(known.coordinates(axis, topology)) == 1:
        return (AVERAGED_PIECE, TERM) if axis in topology.data_axes else (TERM,)  # one holder, whose product counts
    if not known.shared_along(axis, topology) or not known.equal_along(axis, topology):
        return (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    alike: tuple[Along, ...] = (AVERAGED, COPY, TERM) if axis in topology.data_axes else (COPY, TERM)
    if not known.constant:
        return alike
    pieces = (AVERAGED_PIECE, PIECE) if axis in topology.data_axes else (PIECE,)
    return (*pieces, *alike) if split or known.full is not None else (*alike, *pieces)


def split_beside(known: KnownParameter, everything: Sequence[KnownParameter], topology: Topology) -> tuple[str, ...]:
    """The axes along which another parameter of its module has pieces: held by all, with values that differ."""
    beside = [
        other
        for other in everything
        if other is not known and other.module == known.module and other.stage == known.stage
    ]
    return tuple(
        axis for axis in larger_axes(topology) if any(not other.equal_along(axis, topology) for other in beside)
    )
