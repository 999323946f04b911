"""What a parameter is whose gradient, as declared, is not the loss's derivative: another layout, a factor, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ...parallel.mesh.topology import Topology
from .candidates import candidates, split_beside
from .differences import Difference, Differences
from .findings import Cause
from .measured import Known
from .ways import COPY, TERM, Way, larger_axes

_SEEDS = (1, 2)


class Probe:
    """A parameter moved along one direction: its products by rank; the derivative, in as many steps as are asked for."""

    def __init__(self, differences: Differences, known: Known, way: Way, seed: int) -> None:
        direction = differences.measured.direction(known, way, seed)
        (self.products,) = differences.measured.products([(known, direction)])
        self._differences, self._known = differences, known
        self._steps = differences.along([(known, direction)], self.size)
        self._found: list[Difference] = []

    @property
    def size(self) -> float:
        """About how large a derivative is to be expected."""
        return max(self._known.effect, *map(abs, self.products.values()))

    def differences(self) -> Iterator[Difference]:
        """Those that tell something; each is made once."""
        index = 0
        while True:
            if index == len(self._found):
                found = next(self._steps, None)
                if found is None:
                    return
                self._found.append(found)
            found = self._found[index]
            index += 1
            if self._differences.tells(found, max(self.size, abs(found.value))):
                yield found


@dataclass(frozen=True)
class Explanation:
    """What a parameter is.

    Args:
        way: None: no layout makes its gradient right.
        factor: How many times too large it is in that way; 1 where it is right.
        even: The axes along which the ranks' products are equal.
        split: The axes that certainly split another parameter of its module.
    """

    way: Way | None
    factor: float
    even: tuple[str, ...]
    split: tuple[str, ...]


class Explainer:
    """Finds ways; the same on all ranks."""

    def __init__(self, differences: Differences) -> None:
        self.differences, self.topology = differences, differences.topology

    def explain(self, known: Known, declared: Way | None) -> Explanation:
        """Collectives: the model's, in 2 to 12 forwards for each set of axes along which its ranks may be moved apart."""
        split = split_beside(known, self.differences.measured.known, self.topology)
        probes: dict[tuple[str, ...], list[Probe]] = {}

        def probes_of(way: Way) -> list[Probe]:
            if way.apart not in probes:
                probes[way.apart] = [Probe(self.differences, known, way, seed) for seed in _SEEDS]
            return probes[way.apart]

        ways = list(candidates(known, self.topology, split, declared))
        for way in ways:
            if all(self._fits(way, probe) for probe in probes_of(way)):
                return Explanation(way, 1.0, self._even(probes_of(way)[0]), split)
        even = self._even(probes_of(ways[0])[0])
        for way in ways:
            factor = self._factor(way, probes_of(way))
            if factor is not None:
                return Explanation(way, factor, even, split)
        return Explanation(None, 1.0, even, split)

    def copied_along(self, known: Known) -> tuple[str, ...]:
        """The model axes along which values differ and yet the gradient is one: it is taken for a copy, and is none.

        Collectives: object all-gathers.
        """
        differ = [axis for axis in self.topology.model_axes if not known.equal_along(axis, self.topology)]
        way = next(candidates(known, self.topology, (), None))
        found = []
        for axis in differ:
            alike = Way(tuple((other, COPY if other == axis else along) for other, along in way.by_axis))
            probe = Probe(self.differences, known, alike, _SEEDS[0])
            if axis in self._even(probe):
                found.append(axis)
        return tuple(found)

    def _fits(self, way: Way, probe: Probe) -> bool:
        value, spread = way.derivative(probe.products, self.topology)
        if spread > self.differences.digits.relative * 10 * probe.size:
            return False
        size = max(abs(value), probe.size)
        found = (difference for difference in probe.differences() if not difference.unequal)
        return self.differences.judge(found, value, size) == "kept"

    def _factor(self, way: Way, probes: Iterable[Probe]) -> float | None:
        """How many times too large the gradient is, where that is one number along all directions."""
        found: list[float] = []
        for probe in probes:
            value, spread = way.derivative(probe.products, self.topology)
            # Of the smallest step, which meets the fewest kinks, as far as rounding leaves digits.
            exact = [difference for difference in probe.differences() if difference.rounding <= 1e-5 * probe.size]
            difference = max(exact or probe.differences(), key=lambda one: one.rounding, default=None)
            if difference is None or not difference.value or spread > 1e-6 * probe.size:
                return None
            found.append(value / difference.value)
        first, *others = found
        alike = all(abs(other - first) <= 1e-4 * abs(first) for other in others)
        return sum(found) / len(found) if alike and abs(first) > 1e-9 else None

    def _even(self, probe: Probe) -> tuple[str, ...]:
        """The axes along which products are equal."""
        found = []
        for axis in larger_axes(self.topology):
            groups = ([probe.products[r] for r in ranks if r in probe.products] for ranks in self.topology.groups(axis))
            if all(not group or max(group) - min(group) <= 1e-6 * probe.size for group in groups):
                found.append(axis)
        return tuple(found)


def axes_of_factor(factor: float, topology: Topology) -> tuple[str, ...]:
    """The axes whose size (or several axes', together) the factor is."""
    axes = larger_axes(topology)
    single = tuple(axis for axis in axes if abs(topology.size(axis) - factor) < 1e-3 * factor)
    if single:
        return single
    for start in range(len(axes)):
        for stop in range(start + 2, len(axes) + 1):
            if abs(prod(map(topology.size, axes[start:stop])) - factor) < 1e-3 * factor:
                return axes[start:stop]
    return ()


def cause_of(known: Known, declared: Way, found: Explanation, topology: Topology) -> tuple[Cause, tuple[str, ...]]:
    """The kind of mistake, and the axes along which it is."""
    differ = tuple(
        axis for axis, along in declared.by_axis if not along.apart and not known.equal_along(axis, topology)
    )
    if differ and (found.way is None or {*differ} & {*topology.data_axes}):
        return "copies differ", differ
    if found.way is None:
        uneven = tuple(axis for axis, along in declared.by_axis if along == COPY and axis not in found.even)
        return "backward is wrong", uneven
    if found.factor != 1.0:
        too_large = found.factor > 1
        axes = axes_of_factor(found.factor if too_large else 1 / found.factor, topology)
        return ("counted several times" if too_large else "divided too often"), axes
    changed = [axis for axis, was in declared.by_axis if was != found.way.along(axis)]
    assert changed
    axis = changed[0]
    was, now = declared.along(axis), found.way.along(axis)
    if was.apart != now.apart:
        return ("split, not declared" if now.apart else "declared split, but a copy"), (axis,)
    if was == TERM or now.products != "sum":
        return "counted several times", (axis,)
    if now.apart or axis in topology.data_axes:
        return "divided too often", (axis,)
    if axis not in found.even:
        return "a sum is missing", (axis,)
    bias = axis in found.split and len(known.first.shape) == 1
    return ("added on every rank" if bias else "divided too often"), (axis,)
