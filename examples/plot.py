"""Draw curves as an SVG, one below the other, for `--plot`, without another package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite

WIDTH, HEIGHT, MARGIN = 640, 200, 60  # size of a panel without margin, and the margin on each side

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #444 }
  .title { font-weight: 600 }
  .frame { fill: none; stroke: #bbb }
  .curve { fill: none; stroke: #2563eb; stroke-width: 1.5 }
  .beside { fill: none; stroke: #999; stroke-width: 1.5 }
"""


Points = Sequence[tuple[float, float]]


def draw(title: str, curves: Mapping[str, Points], beside: Mapping[str, Points]) -> str:
    """Return an SVG with one panel per curve.

    Args:
        curves: (step, value) points by name of the curve.
        beside: Points of another run by name of the curve, drawn in grey in the same panel.
    """
    width, height = WIDTH + 2 * MARGIN, len(curves) * (HEIGHT + MARGIN) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(MARGIN, 24, title, "title"),
    ]
    for index, (name, points) in enumerate(curves.items()):
        parts += panel(MARGIN + index * (HEIGHT + MARGIN), name, points, beside[name])
    return "\n".join([*parts, "</svg>", ""])


def panel(top: float, name: str, points: Points, beside: Points) -> Iterator[str]:
    """Draw frame, curves, and the ranges of steps and values; a non-finite value is a gap in the curve of ``points``."""
    finite = [(step, value) for step, value in points if isfinite(value)]
    others = [(step, value) for step, value in beside if isfinite(value)]
    yield f'<rect class="frame" x="{MARGIN}" y="{top:g}" width="{WIDTH}" height="{HEIGHT}"/>'
    yield text(MARGIN, top - 8, name)
    if not finite:
        return
    (left, right), (low, high) = ((min(of), max(of)) for of in zip(*finite, *others, strict=True))

    def place(step: float, value: float) -> str:
        x = MARGIN + WIDTH * (step - left) / ((right - left) or 1)
        return f"{x:.1f},{top + HEIGHT * (high - value) / ((high - low) or 1):.1f}"

    if others:
        yield f'<polyline class="beside" points="{" ".join(place(*point) for point in others)}"/>'
    for run in runs([place(step, value) if isfinite(value) else None for step, value in points]):
        yield f'<polyline class="curve" points="{" ".join(run)}"/>'
    yield text(MARGIN - 6, top + 12, f"{high:.3g}", anchor="end")
    yield text(MARGIN - 6, top + HEIGHT, f"{low:.3g}", anchor="end")
    yield text(MARGIN, top + HEIGHT + 16, f"step {left:g}")
    yield text(MARGIN + WIDTH, top + HEIGHT + 16, f"{right:g}", anchor="end")


def runs(places: Sequence[str | None]) -> Iterator[list[str]]:
    """Yield the lists of consecutive points; None separates two lists."""
    run: list[str] = []
    for place in (*places, None):
        if place is not None:
            run.append(place)
        elif run:
            yield run
            run = []


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
