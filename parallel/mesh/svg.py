"""SVG as text, for pictures that show on a light and on a dark page: no package is needed, and any browser draws them.

A picture follows the reader's mode: a class's colours stand in `STYLE`, those of a dark page in `DARK`. Colours that mean
something, `COLOURS`, are the same on both and are told apart by their lightness too.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLOURS = ("#2f81f7", "#e8912d", "#2da44e", "#bf4b8a", "#8957e5", "#1b9e9e", "#d1453b", "#8c959f")
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 } .name { font-size: 15px; font-weight: 600 }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px }
  .quiet { fill: #59636e; font-size: 12px } .inside { fill: #0d1117; font-size: 12px; font-weight: 600 }
  .page { fill: #ffffff; stroke: #d1d9e0 } .card { fill: #f6f8fa; stroke: #d1d9e0 } .cell { fill: #ffffff; stroke: #afb8c1 }
  .line { fill: none; stroke: #d1d9e0 } .mark { fill: none; stroke: #59636e; stroke-width: 1.4; stroke-dasharray: 5 4 }
  .group { fill: none; stroke: #59636e; stroke-width: 1.6; stroke-dasharray: 5 4 }
"""
DARK = """
    text { fill: #e6edf3 } .quiet { fill: #9198a1 } .inside { fill: #0d1117 } .page { fill: #0d1117; stroke: #3d444d }
    .card { fill: #1b2129; stroke: #3d444d } .cell { fill: #0d1117; stroke: #59636e }
    .line { stroke: #3d444d } .mark { stroke: #9198a1 } .group { stroke: #9198a1 }
"""


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text: at its start, its middle or its end."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 0, fill: str = "") -> str:
    """A rectangle, in the colours of its class or filled."""
    style = f' style="fill: {fill}"' if fill else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"{style}/>'


def line(points: Iterable[tuple[float, float]], kind: str = "line", colour: str = "", width: float = 1.6) -> str:
    """A line through points, in the colour of its class or in one of its own."""
    style = f' style="fill: none; stroke: {colour}; stroke-width: {width:g}"' if colour else ""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"{style}/>'


def page(title: str, width: float, height: float, parts: Iterable[str], style: str | None = None) -> str:
    """The whole picture, its title on top; ``style`` replaces the one that follows the reader's light or dark mode."""
    style = style or f"{STYLE}  @media (prefers-color-scheme: dark) {{{DARK}  }}\n"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    lines = [head, f"<title>{escape(title)}</title>", f"<style>{style}</style>"]
    lines += [box(0.5, 0.5, width - 1, height - 1, "page", 12), text(36, 40, title, "title"), *parts]
    return "\n".join([*lines, "</svg>", ""])
