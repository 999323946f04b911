"""A chart as inline SVG: curves over steps, whose values show where the pointer is, with and without scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

from .labels import TOTAL

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 34
COLORS = 8
MOST = 600  # points of one curve
Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """From values to places between two pixels; logarithmic where values are positive and span more than 30 times."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], first: float, last: float, may_be_log: bool = True) -> Scale:
        """Of the finite values among these."""
        finite = [value for value in values if isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        if may_be_log and low > 0 and high / low > 30:
            return cls(low, high, first, last, log=True)
        if low == high:
            low, high = min(0.0, 1.25 * low), max(0.0, 1.25 * low) or float(low == 0)
        return cls(low, high, first, last)

    def __call__(self, value: float) -> float:
        if self.log:
            part = log10(value / self.low) / log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self.first + part * (self.last - self.first), 1)

    def ticks(self, most: int) -> list[float]:
        """Round numbers within it."""
        if self.log:
            first, last = floor(log10(self.low)), ceil(log10(self.high))
            decades = [10.0**k for k in range(first, last + 1, max(1, ceil((last - first) / most)))]
            fine = [m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5)]
            inside = [value for value in decades if self.low <= value <= self.high]
            return inside if len(inside) > 1 else [value for value in fine if self.low <= value <= self.high]
        rough = (self.high - self.low) / most
        unit = 10.0 ** floor(log10(rough))
        width = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * (1 - 1e-9))
        first = ceil(self.low / width - 1e-9)
        return [k * width for k in range(first, floor(self.high / width + 1e-9) + 1)]


def chart(name: str, series: Mapping[str, Sequence[Point]]) -> str:
    """An SVG element of curves, by label; each of (step, value) points, in the order of steps.

    Values that are not finite break a curve, and are marks at the upper edge.
    """
    steps = [step for points in series.values() for step, _ in points]
    x = Scale.of(steps, LEFT, WIDTH - RIGHT, may_be_log=False)
    y = Scale.of([value for points in series.values() for _, value in points], HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y)]
    drawn = {label: thinned(points) for label, points in series.items()}
    # The whole model's curve comes first, and lies above the others.
    for index, (label, points) in reversed([*enumerate(drawn.items())]):
        parts.append(_curve(label, points, x, y, f"c{index % COLORS}" + " main" * (label == TOTAL or len(drawn) == 1)))
    known = [
        [label, [[step, value if isfinite(value) else str(value)] for step, value in points]]
        for label, points in drawn.items()
    ]
    data = escape(json.dumps({"left": x.first, "right": x.last, "low": x.low, "high": x.high, "series": known}))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}" data-points="{data}">'
        f'{"".join(parts)}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def _grid(x: Scale, y: Scale) -> str:
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v)}" y2="{y(v)}"/>'
        f'<text class="tick" x="{LEFT - 7}" y="{y(v) + 3.5}" text-anchor="end">{number(v)}</text>'
        for v in y.ticks(5)
    ]
    columns = [
        f'<text class="tick" x="{x(v)}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{v:,.0f}</text>'
        for v in x.ticks(6)
        if v == round(v)
    ]
    said = [f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 1}" text-anchor="end">step</text>']
    if y.log:
        said.append(f'<text class="tick" x="{LEFT + 6}" y="{TOP + 8}">logarithmic</text>')
    return "".join(rows + columns + said)


def _curve(label: str, points: Sequence[Point], x: Scale, y: Scale, kind: str) -> str:
    runs: list[list[Point]] = [[]]
    marks, titles = [], []
    for step, value in points:
        said = f"<title>{escape(label)}, step {step:,.0f}: {number(value)}</title>"
        if isfinite(value):
            runs[-1].append((x(step), y(value)))
            titles.append(f'<circle class="point" cx="{x(step)}" cy="{y(value)}" r="5">{said}</circle>')
        else:
            runs.append([])
            marks.append(f'<path class="broken" d="M{x(step) - 4} {TOP}h8l-4 7z">{said}</path>')
    lines = [f'<polyline points="{" ".join(f"{a},{b}" for a, b in run)}"/>' for run in runs if len(run) > 1]
    dots = [f'<circle class="dot" cx="{run[0][0]}" cy="{run[0][1]}" r="2.5"/>' for run in runs if len(run) == 1]
    return f'<g class="{kind}">{"".join(lines + dots + titles)}</g>{"".join(marks)}'


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """No more than so many of them: of each stretch the least and the largest, so that spikes stay, and what is not
    finite."""
    if len(points) <= most:
        return [*points]
    kept = set[int]()
    length = ceil(2 * len(points) / most)
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        finite = [index for index in stretch if isfinite(points[index][1])]
        kept |= {index for index in stretch if index not in finite}
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def number(value: float) -> str:
    """In few characters."""
    if not isfinite(value) or value == 0:
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if value == round(value) else f"{value:,.5g}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
