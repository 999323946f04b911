"""One recorded step of two runs: distances of the figures, and the mesh axes that may explain a difference.

In names and texts, the runs are A and B. A ratio is a number of B divided by the same number of A.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite, prod, sqrt
from typing import Literal, NamedTuple

from .recorder import QUANTITIES
from .recording import Figures, RecordedStep
from .rounding import Tolerances, coarsest, compute_dtype, distance, multiple

Cause = Literal[
    "not in the optimizer",
    "tied parameter",
    "layout",
    "seed",
    "initial scale",
    "order",
    "written weights",
    "batch",
    "forward",
    "missing sum",
    "not averaged",
    "counted several times",
    "averaged twice",
    "micro-batches",
    "loss scale",
    "clipped before",
    "sign",
    "scaled",
    "no gradient",
    "partial sum",
    "non-finite",
    "skipped",
    "clip threshold",
    "clip norm",
    "learning rate",
    "weight decay",
    "hyper-parameter",
    "not stepped",
    "update of shards",
    "optimizer state",
    "other optimizer",
]


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs beyond rounding, and its probable cause.

        found = compare_runs("a.jsonl", "b.jsonl").difference
        if found is not None:
            print(found.step, found.parameter, found.cause, found.axis)

    Args:
        step: Number of the step. In the earlier steps that both runs recorded, they differ by rounding only.
        quantity: "layout", "weight", "gradient", "decision", "option" or "update".
        parameter: The name of the parameter that shows the cause best, or else the first of ``parameters``. None: the
            difference concerns no parameter, such as the clip coefficient.
        parameters: All parameters that differ in this quantity and step; for an option, in the option that ``text``
            names. If the quantity is weight, gradient or update, the parameter with the largest relative distance comes
            first.
        cause: The probable cause, a short name.
        axis: The mesh axis of the cause, or axes joined by `` x ``. None: the cause concerns no axis, or the axis is not
            known.
        ratio: A number of B, such as a norm or a learning rate, divided by the same number of A. None: no ratio is known.
        text: An explanation.
    """

    step: int
    quantity: str
    parameter: str | None
    parameters: tuple[str, ...]
    cause: Cause
    axis: str | None
    ratio: float | None
    text: str


# Accepted distances ---------------------------------------------------------------------------------------------------


class Accepted:
    """Distances that earlier steps accepted as rounding.

    Attributes:
        slack: By parameter, the sum of the accepted distances of earlier updates. The update of a step that was not
            compared counts like the last compared update.
        last_update: By parameter, the accepted distance of the last compared update.
        noise: By parameter, the largest accepted relative distance of its gradient, at most 1.
        equal: False if a hash differed or was not known.
        last_step: Number of the last compared step; None before the first one.
    """

    def __init__(self, tolerances: Tolerances) -> None:
        self.tolerances = tolerances
        self.slack: dict[str, float] = {}
        self.last_update: dict[str, float] = {}
        self.noise: dict[str, float] = {}
        self.largest = dict.fromkeys(QUANTITIES, 0.0)
        self.equal = True
        self.last_step: int | None = None


# One step of two runs -------------------------------------------------------------------------------------------------

Which = Literal["A", "B"]


class AxisMatch(NamedTuple):
    """A mesh axis whose size explains a ratio.

    ``axis`` may be several axes, joined by `` x ``. ``which`` is the run with the axis, and t its size. ``kind`` is
    "t", "1/t", "sqrt t" or "1/sqrt t": a number of this run divided by the same number of the other run.
    """

    axis: str
    which: Which
    size: int
    kind: str
    roles: frozenset[str]


class StepPair:
    """One recorded step of two runs.

    ``names`` are the parameters of both runs, in the order of A. ``drift`` is the relative distance of all weights
    together; the comparison of weights sets it.
    """

    def __init__(self, step: int, a: RecordedStep, b: RecordedStep, accepted: Accepted) -> None:
        self.step, self.a, self.b, self.accepted = step, a, b, accepted
        self.names = [name for name in a.names if name in b.line["parameters"]]
        self._dtypes = {name: coarsest(compute_dtype(a, name), compute_dtype(b, name)) for name in self.names}
        self.drift = 0.0

    @property
    def sides(self) -> tuple[tuple[Which, RecordedStep, RecordedStep], ...]:
        """Return (name of a run, its step, the step of the other run) for each run, B first."""
        return ("B", self.b, self.a), ("A", self.a, self.b)

    def run(self, which: Which) -> RecordedStep:
        """Return the recorded step of run A or B."""
        return self.a if which == "A" else self.b

    def tolerance(self, name: str) -> float:
        """Return the relative tolerance of a parameter's gradient."""
        return self.accepted.tolerances.at(self._dtypes[name], self.step)

    def both(self, name: str, quantity: str) -> tuple[Figures, Figures]:
        """Return the `Figures` of a parameter in A and in B; ``quantity`` is one of `QUANTITIES`."""
        return self.a.figures[name][quantity], self.b.figures[name][quantity]

    def distance(self, name: str, quantity: str) -> tuple[float, float]:
        """Return the distance of A and B, and the larger norm. A non-finite norm counts as 0.

        So an infinite distance, of a tensor that is finite in one run only, exceeds every tolerance times the norm.
        """
        a, b = self.both(name, quantity)
        return distance(a, b), max(norm if isfinite(norm) else 0.0 for norm in (a.norm, b.norm))

    def relative(self, name: str, quantity: str) -> float:
        """Return the distance of A and B, divided by the larger norm; 0 if the distance is 0."""
        found, size = self.distance(name, quantity)
        return found / size if found and size else (inf if found else 0.0)

    def multiple(self, name: str, quantity: str) -> float | None:
        """Return r if the tensor in B is r times the tensor in A; None if it is no multiple of it.

        Return None also for tensors with one element, because any two numbers are multiples of each other.
        """
        if self.numel(name) == 1:
            return None
        return multiple(*self.both(name, quantity), self.tolerance(name))

    def numel(self, name: str) -> int:
        """Return the number of elements of a parameter; a large number if its shape is not known."""
        shape = self.a.layout(name)["shape"]
        return 2**31 if shape is None else prod(shape)

    def is_all(self, names: Sequence[str]) -> bool:
        """Return True if ``names`` has all parameters of both runs. It must not contain a name twice."""
        return len(names) == len(self.names)

    def by_distance(self, names: Sequence[str], quantity: str) -> list[str]:
        """Return the names, with the largest relative distance first.

        Names whose distances are equal to two digits keep their order, so that rounding errors do not change it.
        """
        return sorted(names, key=lambda name: -float(f"{self.relative(name, quantity):.1e}"))

    def accept(self, name: str, quantity: str, relative: float) -> None:
        """Record an accepted relative distance."""
        a, b = self.both(name, quantity)
        self.accepted.equal = self.accepted.equal and a.hash is not None and a.hash == b.hash
        self.accepted.largest[quantity] = max(self.accepted.largest[quantity], relative)

    # Axes -------------------------------------------------------------------------------------------------------------

    def _sized_axes(self) -> Iterator[tuple[tuple[str, ...], Which, int]]:
        """Yield (axes, run, product of sizes) of all combinations of axes; products that differ between runs come first."""
        found = []
        for which, run, other in self.sides:
            for count in range(1, len(run.axes) + 1):
                for axes in combinations(run.axes, count):
                    size = prod(map(run.size, axes))
                    found.append((size == prod(map(other.size, axes)), count, axes, which, size))
        for _, _, axes, which, size in sorted(found, key=lambda item: item[:2]):
            yield axes, which, size

    def axis_of_ratio(
        self, ratio: float, names: Sequence[str], tolerance: float = 1e-3, only: Sequence[str] | None = None
    ) -> AxisMatch | None:
        """Return the axis, or several axes, whose size explains ``ratio`` best; None: no size fits.

        ``names`` are the parameters that have this ratio. A mistake along a model axis often concerns exactly the
        parameters that are sharded over the axis, or exactly the parameters that are not. ``only`` has the accepted kinds
        of `AxisMatch`; None: all.
        """
        best: tuple[float, AxisMatch] | None = None
        for order, (axes, which, size) in enumerate(self._sized_axes()):
            own, roles = ratio if which == "B" else 1 / ratio, frozenset(map(self.run(which).role, axes))
            kinds = {"t": float(size), "1/t": 1 / size, "sqrt t": sqrt(size), "1/sqrt t": 1 / sqrt(size)}
            for kind, value in kinds.items():
                if abs(own / value - 1) > tolerance or (only is not None and kind not in only):
                    continue
                score = self._fit(axes, which, names) - 0.01 * order - (1 if "sqrt" in kind else 0)
                if best is None or score > best[0]:
                    best = score, AxisMatch(" x ".join(axes), which, size, kind, roles)
        return None if best is None else best[1]

    def _fit(self, axes: Sequence[str], which: Which, names: Sequence[str]) -> float:
        """Return how well the parameters fit a mistake along the axes; larger is better."""
        run = self.run(which)
        only_data = {run.role(axis) for axis in axes} == {"data"}
        if self.is_all(names):
            return 3.0 if only_data else 0.0
        return -1.0 if only_data else max(self._fit_of_axis(axis, run, {*names}) for axis in axes)

    def _fit_of_axis(self, axis: str, run: RecordedStep, names: set[str]) -> float:
        sharded = {name for name in self.names if axis in run.layout(name)["distinct"]}
        if names in (sharded, {*self.names} - sharded):
            return 3.0
        return 1.0 if names <= sharded or not names & sharded else 0.5

    def axis_of_shards(self, names: Sequence[str], exact: bool) -> str | None:
        """Return the axis over which the parameters ``names`` are sharded; None if there is no such axis.

        Return None also if ``names`` has all parameters of both runs, because their sharding then explains nothing. If
        ``exact`` is True, no other parameter may be sharded over the axis.
        """
        chosen, found = {*names}, []
        for _, run, other in self.sides:
            for axis in run.axes if not self.is_all(names) else ():
                sharded = {name for name in self.names if axis in run.layout(name)["sharded"]}
                if chosen == sharded or (not exact and chosen <= sharded):
                    found.append((run.size(axis) == other.size(axis), chosen != sharded, axis))
        return min(found)[2] if found else None

    def only_sharding_axis(self, name: str) -> str | None:
        """Return the axis over which a parameter is sharded; None if it is sharded over no axis or over several."""
        axes = {axis for _, run, _ in self.sides for axis in run.layout(name)["sharded"] if run.size(axis) > 1}
        return axes.pop() if len(axes) == 1 else None
