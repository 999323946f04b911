"""Whether the loss changes by what the gradients say: central differences in few steps, for many parameters at once.

Parameters that are moved together, each along its own random direction, change the loss by the sum of what each does: if
that is what their gradients promise, all of them are right, for errors don't cancel along random directions. If it isn't,
halves are moved; where halves of halves are all wrong, one after another. So a right model costs two forwards for some
dozens of parameters, one wrong parameter of them some dozens, and where most are wrong, four or five for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log10
from typing import Literal

import torch
from torch import Tensor

from .measured import KnownParameter, Measured
from .objective import Losses, Objective, unequal_along, whole_loss

TOGETHER = 64  # parameters that are moved at once: an error of one is seen if it is this many times the tolerance
ALIKE = 1.5  # powers of ten within which their effects are
_STEPS = (1.0, 0.1, 0.01, 0.001, 10.0)
_CHANGE = 1e-6  # of the loss, that a step is to make
_TINY = 1e-13  # a step that shows nothing but rounding
_FAR = 100  # times the tolerance, by which differences are off that need no smaller step to be wrong
Kept = Literal["kept", "wrong", "untold"]


@dataclass(frozen=True)
class Digits:
    """How exactly losses of a dtype tell a derivative."""

    relative: float  # of a derivative, what differences may be off
    noise: float  # of a loss: rounding, at least
    smallest: float  # step, of the size of the elements
    largest: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Digits:
        """Raises TypeError: differences of losses of this dtype tell nothing."""
        if dtype == torch.float64:
            return cls(1e-7, 5e-15, 1e-7, 1e-3)
        if dtype == torch.float32:
            return cls(5e-3, 1e-6, 1e-3, 1e-1)
        raise TypeError(
            f"differences of losses in {dtype} have no digits to tell a derivative: prove the model in float64, which "
            "leaves it as it is afterwards, or build it in float64 or float32"
        )


@dataclass(frozen=True)
class Difference:
    """A derivative of the loss along a direction, by a difference.

    Args:
        rounding: How much of it may be rounding.
        unequal: The axes along which ranks that share a loss got different ones on the way.
    """

    value: float
    rounding: float
    unequal: tuple[str, ...]


class Differences:
    """Derivatives of an objective in the parameters that were measured."""

    def __init__(
        self, objective: Objective, measured: Measured, base: Losses, digits: Digits, noise: float = 0.0
    ) -> None:
        self.objective, self.measured, self.digits = objective, measured, digits
        self.topology = measured.topology
        self.loss = abs(whole_loss(base, self.topology))
        self.noise = max(noise, digits.noise * self.loss)

    def measure_noise(self, promises: Sequence[Promise]) -> None:
        """How much rounding is in a loss: it can be a small difference of large numbers. Collectives: of two forwards."""
        promised = sum(promise.value for promise in promises)
        up, down = (self._moved([(p.known, p.direction) for p in promises], sign * _TINY) for sign in (1, -1))
        change = whole_loss(up, self.topology) - whole_loss(down, self.topology)
        self.noise = max(self.noise, 10 * abs(change - 2 * _TINY * promised))

    def along(self, directions: Sequence[tuple[KnownParameter, Tensor | None]], size: float) -> Iterator[Difference]:
        """With one step after another, each two forwards, as long as somebody asks.

        Args:
            size: About how much the loss changes along the directions.
        """
        digits = self.digits
        wanted = _CHANGE * self.loss / size if size else digits.largest
        first = min(max(wanted, 10 * digits.smallest), digits.largest)
        for factor in _STEPS:
            step = first * factor
            pair = [self._moved(directions, sign * step) for sign in (1, -1)]
            up, down = (whole_loss(losses, self.topology) for losses in pair)
            rounding = self.noise / step
            apart = {axis for losses in pair for axis in unequal_along(losses, self.topology, self._within(step, size))}
            yield Difference((up - down) / (2 * step), rounding, tuple(sorted(apart)))

    def _within(self, step: float, size: float) -> float:
        """By how much equal losses may differ."""
        return 10 * self.noise + 1e-3 * step * size

    def _moved(self, directions: Sequence[tuple[KnownParameter, Tensor | None]], step: float) -> Losses:
        before = self.measured.move(directions, step)
        try:
            return self.objective()
        finally:
            self.measured.put_back(before)

    def judge(self, found: Iterable[Difference], promised: float, size: float) -> Kept:
        """Whether differences are what the gradients promise, of terms that add up to ``size`` without their signs.

        A kink of the loss (ReLU, maximum, top-k) within a step makes a difference wrong, and smaller steps meet fewer: so
        one that agrees is enough, if those before it were too far off to be the same error, seen less exactly. Two that
        are far off by the same have met none.
        """
        before: list[tuple[float, float]] = []
        for difference in found:
            if not self.tells(difference, size):
                continue
            off, allowed = difference.value - promised, self.digits.relative * size + difference.rounding
            if abs(off) <= allowed and all(
                abs(other) > 1.5 * allowed or abs(off) < 0.1 * abs(other) for other, _ in before
            ):
                return "kept"
            if any(abs(off - other) <= allowed + more < abs(off) / _FAR for other, more in before):
                return "wrong"
            before.append((off, allowed))
        return "wrong" if before else "untold"

    def never_tells(self, size: float) -> bool:
        """Whether effects of this size are lost in rounding at the largest step too."""
        return self.noise / self.digits.largest > 0.01 * size

    def tells(self, found: Difference, size: float) -> bool:
        """Whether what it is to be compared with isn't lost in rounding."""
        return found.rounding <= 0.01 * size


@dataclass(frozen=True)
class Promise:
    """What the gradients of one parameter say that the loss changes by along its direction.

    Args:
        size: How large such a value is on average, over all directions: not of this one, or two that are wrong alike, and
            have been made equally large, would cancel.
    """

    known: KnownParameter
    direction: Tensor | None
    value: float
    size: float

    def scaled(self, size: float) -> tuple[tuple[KnownParameter, Tensor | None], float]:
        """With a direction along which it is about ``size`` large."""
        factor = size / self.size if self.size else 1.0
        return (self.known, None if self.direction is None else self.direction * factor), self.value * factor


def wrong_ones(
    differences: Differences, promises: Sequence[Promise]
) -> tuple[list[KnownParameter], list[KnownParameter]]:
    """Those whose promise is not kept, and those of which nothing can be told: what they do is lost in rounding."""
    wrong: list[KnownParameter] = []
    untold: list[KnownParameter] = []
    for group in _groups(promises):
        for found, sort in _search(differences, group):
            (wrong if sort == "wrong" else untold).append(found)
    return wrong, untold


def _groups(promises: Sequence[Promise]) -> Iterator[list[Promise]]:
    """Of effects of about one size; those that promise none for themselves."""
    by_size: dict[int | None, list[Promise]] = {}
    for promise in promises:
        size = None if not promise.size else int(log10(promise.size) // ALIKE)
        by_size.setdefault(size, []).append(promise)
    for group in by_size.values():
        for start in range(0, len(group), TOGETHER):
            yield group[start : start + TOGETHER]


def _search(differences: Differences, group: list[Promise]) -> Iterator[tuple[KnownParameter, Kept]]:
    sort = _kept(differences, group)
    if sort != "kept":
        yield from _within(differences, group, sort, crowded=False)


def _within(
    differences: Differences, group: list[Promise], sort: Kept, crowded: bool
) -> Iterator[tuple[KnownParameter, Kept]]:
    """Those of a group that are not kept.

    Args:
        sort: What the group is: not kept.
        crowded: The other half of what it is a half of is not kept either.
    """
    if len(group) == 1:
        yield group[0].known, sort
        return
    middle = len(group) // 2
    parts = [group[:middle], group[middle:]]
    sorts = [_kept(differences, parts[0])]
    # What is not in the first half is in the second; of a single one nothing is said that was not seen.
    sorts.append(sort if sorts == ["kept"] and len(parts[1]) > 1 else _kept(differences, parts[1]))
    all_wrong = "kept" not in sorts
    if all_wrong and crowded and len(group) > 2:
        parts = [[promise] for promise in group]
        sorts = [_kept(differences, part) for part in parts]
    for part, of_part in zip(parts, sorts, strict=True):
        if of_part != "kept":
            yield from _within(differences, part, of_part, all_wrong)


def _kept(differences: Differences, group: Sequence[Promise]) -> Kept:
    typical = sorted(promise.size for promise in group)[len(group) // 2]
    scaled = [promise.scaled(typical) for promise in group]
    promised, size = sum(value for _, value in scaled), sum(max(abs(value), typical) for _, value in scaled)
    found = differences.along([pair for pair, _ in scaled], size)
    if not size:  # no gradient: the loss must not change at all
        first = next(found)
        return "kept" if abs(first.value) <= 10 * first.rounding else "wrong"
    return differences.judge(found, promised, size)
