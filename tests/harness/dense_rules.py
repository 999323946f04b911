"""Reference implementations of the clip rules, as in their papers, for one process that has all norms.

They compute with Python floats. A reference gets the norm of every logical parameter and returns the factor for each
one, or None to skip the step. `state` has the values that it keeps between steps, in the format of
`ParallelOptimizer.clip_state`, except that values per parameter are in a dict by key.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import inf, sqrt
from types import EllipsisType
from typing import Any

from meshstep.optim import (
    AdaGC,
    ByName,
    ByNorm,
    ByPreviousNorm,
    Clip,
    PerParameter,
    SkipSpikes,
    WarmUp,
    ZClip,
)
from planted import Key

Norms = Mapping[Key, float]
Factors = dict[Key, float]


def total_of(norms: Norms) -> float:
    return sqrt(sum(norm * norm for norm in norms.values()))


def coefficient(norm: float, most: float) -> float:
    return min(1.0, most / (norm + 1e-6))


def threshold(given: object, steps: int) -> float:
    if isinstance(given, WarmUp):
        return given.start + (given.end - given.start) * min(1.0, steps / given.steps)
    assert isinstance(given, float)
    return given


class DenseRule:
    """The reference implementation of a clip rule, or of no rule (None)."""

    def __init__(self, rule: Clip | None) -> None:
        self.rule, self.steps = rule, 0
        self.state: dict[str, Any] = {}
        self._start: Callable[[Norms], Factors | None] = {
            type(None): self.nothing,
            ByNorm: self.by_norm,
            PerParameter: self.per_parameter,
            ByPreviousNorm: self.by_previous,
            ZClip: self.zclip,
            AdaGC: self.adagc,
            SkipSpikes: self.skip_spikes,
            ByName: self.by_name,
        }[type(rule)]
        self.seen: list[float] = []
        self.inner = {}
        if isinstance(rule, SkipSpikes):
            assert rule.inner is None or isinstance(rule.inner, Clip)
            self.inner[""] = DenseRule(rule.inner)
        if isinstance(rule, ByName):
            others = None if isinstance(rule.others, EllipsisType) else rule.others
            self.inner = {pattern: DenseRule(own) for pattern, own in (*rule.groups, ("", others))}

    def __call__(self, norms: Norms) -> Factors | None:
        factors = self._start(norms)
        self.steps += 1
        return factors

    def nothing(self, norms: Norms) -> Factors:
        return dict.fromkeys(norms, 1.0)

    def by_norm(self, norms: Norms) -> Factors:
        assert isinstance(self.rule, ByNorm)
        if callable(self.rule.max_norm):
            self.state = {"steps": self.steps + 1}
        return dict.fromkeys(norms, coefficient(total_of(norms), threshold(self.rule.max_norm, self.steps)))

    def per_parameter(self, norms: Norms) -> Factors:
        assert isinstance(self.rule, PerParameter)
        if callable(self.rule.max_norm):
            self.state = {"steps": self.steps + 1}
        most = threshold(self.rule.max_norm, self.steps)
        return {key: coefficient(norm, most) for key, norm in norms.items()}

    def by_previous(self, norms: Norms) -> Factors:
        assert isinstance(self.rule, ByPreviousNorm)
        total = total_of(norms)
        before = self.state.get("norm", total)
        self.state = {"norm": total}
        return dict.fromkeys(norms, coefficient(before, threshold(self.rule.max_norm, self.steps)))

    def zclip(self, norms: Norms) -> Factors:
        """Apply ZClip (arXiv:2504.02507, section 3): z-score, reciprocal clipping, statistics of the clipped norm."""
        assert isinstance(self.rule, ZClip)
        rule, norm = self.rule, total_of(norms)
        clipped = norm
        if self.steps < rule.warm_up:
            self.seen.append(norm)
            mean, var = statistics.fmean(self.seen), statistics.pvariance(self.seen)
        else:
            mean, var = self.state["mean"], self.state["var"]
            z = (norm - mean) / sqrt(var)
            if z > rule.z:
                clipped = mean + rule.z**2 / z * sqrt(var)
            mean = rule.decay * mean + (1 - rule.decay) * clipped
            var = rule.decay * var + (1 - rule.decay) * (clipped - mean) ** 2
        self.state = {"steps": self.steps + 1, "mean": mean, "var": var}
        if rule.max_norm is not None:
            clipped = min(clipped, threshold(rule.max_norm, self.steps))
        return dict.fromkeys(norms, clipped / norm)

    def adagc(self, norms: Norms) -> Factors:
        """Apply AdaGC (arXiv:2502.11034, algorithm 1).

        In addition, a norm of 0 does not change the average, and a parameter without any norm so far is still in the
        warm-up.
        """
        assert isinstance(self.rule, AdaGC)
        rule, total = self.rule, total_of(norms)
        mean, factors = self.state.get("mean", dict.fromkeys(norms, inf)), {}
        for key, norm in norms.items():
            if self.steps < rule.warm_up or mean[key] == inf:
                factors[key] = min(rule.max_norm / total, 1.0)
                new = min(mean[key], factors[key] * norm)
            else:
                factors[key] = min(rule.factor * mean[key] / norm, 1.0) if norm else 1.0
                new = rule.decay * mean[key] + (1 - rule.decay) * factors[key] * norm
            mean = {**mean, key: new if norm else mean[key]}
        self.state = {"steps": self.steps + 1, "mean": mean}
        return factors

    def skip_spikes(self, norms: Norms) -> Factors | None:
        assert isinstance(self.rule, SkipSpikes)
        rule, norm, inner = self.rule, total_of(norms), self.inner[""]
        last = self.seen[-rule.window :]
        factors: Factors | None = None
        bound = (
            rule.factor * (statistics.median(last) if rule.statistic == "median" else statistics.fmean(last))
            if last
            else inf
        )
        if len(self.seen) >= rule.warm_up and norm > bound:
            self.seen.append(bound)
        else:
            self.seen.append(norm)
            factors = inner(norms)
        kept = [inf] * rule.window
        for index, value in enumerate(self.seen):
            kept[index % rule.window] = value
        self.state = {"steps": self.steps + 1, "norms": kept, **{f"then/{key}": v for key, v in inner.state.items()}}
        return factors

    def by_name(self, norms: Norms) -> Factors:
        factors: Factors = {}
        left = dict(norms)
        for pattern, inner in self.inner.items():
            own = {key: norm for key, norm in left.items() if not pattern or fnmatchcase(key[0], pattern)}
            left = {key: norm for key, norm in left.items() if key not in own}
            found = inner(own)
            assert found is not None
            factors |= found
            self.state |= {f"{pattern}/{name}": value for name, value in inner.state.items()}
        return factors
