"""Draw the shards of typical parameters on a topology: ``python -m meshstep.parallel data=2 row=2 col=2 --svg ranks.svg``.

The picture has one panel per parameter. The parameters are those of the parallel layers whose axis names the topology
has, and a replicated parameter. A panel has one card per rank. A card shows the full tensor as a grid, in which the
cells of the rank's shard are filled. Equal shards have the same colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import product
from typing import NamedTuple

from ..mesh.topology import Topology
from .spec import P

# SVG elements ---------------------------------------------------------------------------------------------------------

# SVG is written as text, because that needs no package.
#
# A picture follows the light or dark mode of the browser: `STYLE` has the colours of light mode, and `DARK` the colours
# of dark mode. The colours of shards, `COLOURS`, are the same in both modes.

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
    """Return a line of text as SVG; its ``anchor`` (``"start"``, ``"middle"`` or ``"end"``) is at (x, y), in pixels."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 0, fill: str = "") -> str:
    """Return a rectangle as SVG, with its upper left corner at (x, y). All lengths are in pixels."""
    style = f' style="fill: {fill}"' if fill else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"{style}/>'


def line(points: Iterable[tuple[float, float]], kind: str = "line", colour: str = "", width: float = 1.6) -> str:
    """Return a line through ``points``, (x, y) in pixels, as SVG; ``width`` is used only with a ``colour``."""
    style = f' style="fill: none; stroke: {colour}; stroke-width: {width:g}"' if colour else ""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"{style}/>'


def page(title: str, width: float, height: float, parts: Iterable[str], style: str | None = None) -> str:
    """Return a complete SVG picture. ``style`` is a style sheet; None: it follows the light or dark mode of the browser."""
    style = style or f"{STYLE}  @media (prefers-color-scheme: dark) {{{DARK}  }}\n"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    lines = [head, f"<title>{escape(title)}</title>", f"<style>{style}</style>"]
    lines += [box(0.5, 0.5, width - 1, height - 1, "page", 12), text(36, 40, title, "title"), *parts]
    return "\n".join([*lines, "</svg>", ""])


# The picture: one panel per parameter, one card per rank --------------------------------------------------------------

MOST = 64  # largest number of ranks in a picture
CARD, BETWEEN, MARGIN, WIDTH = 58, 8, 36, 900
BAR = 14  # height of a tensor of one dim, in pixels
HEAD, FOOT = 48, 52  # heights in pixels: of the title and spec above the cards of a panel, and of the text below them

Cells = frozenset[tuple[int, ...]]


class Shown(NamedTuple):
    title: str
    spec: P
    dims: int


def parameters(topology: Topology) -> list[Shown]:
    """Return the parameters to draw: those of each kind of layer whose axes the topology has, and a replicated one."""
    names = {*topology.axes, *topology.aliases}
    found = []
    if {"row", "col"} <= names:
        depth, kind = (("depth",), "2.5-D") if "depth" in names else ((), "2-D")
        weight, bias = P("row", "col", partial=depth), P("col", partial=depth)
        found += [Shown(f"{kind} weight", weight, 2), Shown("its bias", bias, 1)]
    if {"input", "weight", "output"} <= names:
        found += [
            Shown("3-D weight", P(("output", "weight"), "input"), 2),
            Shown("its bias", P("input"), 1),
            Shown("classifier weight", P(None, "output", owned={"input": "output"}), 2),
        ]
    for axis in sorted(names & {"tensor", "tp"})[:1]:
        found += [
            Shown("weight, sharded by outputs", P(axis, None), 2),
            Shown("its bias", P(axis), 1),
            Shown("weight, sharded by inputs", P(None, axis), 2),
        ]
    for axis in sorted(names & {"expert", "ep"})[:1]:
        found += [Shown("expert weights", P(axis, None, None), 3)]
    return [*found, Shown("a replicated parameter", P(), 1)]


def held(shown: Shown, topology: Topology, rank: int) -> Cells:
    """Return the indices of the cells that ``rank`` holds. Along each dim, the full tensor has one cell per shard."""
    coordinate = topology.coordinate(rank)
    if not shown.spec.holds(coordinate, topology):
        return frozenset()
    spans = [
        shown.spec.spans(dim, length, topology, coordinate) for dim, length in enumerate(cells_of(shown, topology))
    ]
    return frozenset(product(*([start + i for start, length in dim for i in range(length)] for dim in spans)))


def cells_of(shown: Shown, topology: Topology) -> tuple[int, ...]:
    """Return the number of shards along each tensor dim."""
    return tuple(topology.size(*topology.expand_aliases(*shown.spec.dim_axes(dim))) for dim in range(shown.dims))


def draw(topology: Topology) -> str:
    """Return the picture of a topology of at most 64 ranks as SVG."""
    if topology.world_size > MOST:
        raise ValueError(
            f"{topology!r} has {topology.world_size:,} ranks, but a picture shows at most {MOST}; leave --svg out to print "
            "a table, or make the axes smaller"
        )
    parts: list[str] = []
    cards = cards_of(topology)
    width, height = cards.panel_size
    left, top, widest = float(MARGIN), 62.0, 0.0
    for shown in parameters(topology):
        if left > MARGIN and left + width > WIDTH - MARGIN:
            left, top = float(MARGIN), top + height
        parts += panel(shown, topology, cards, left, top)
        widest = max(widest, left + width)
        left += width + MARGIN
    sizes = ", ".join(f"{axis}={topology.size(axis)}" for axis in topology.axes)
    title = f"Who holds what: {sizes or 'one rank'}"
    legend = "Filled: the shard of the full tensor that a rank holds. Equal shards have the same colour."
    bottom = top + height + 28
    parts.append(text(MARGIN, bottom, legend, "quiet"))
    if topology.aliases:
        bottom += 20
        joined = ", ".join(f"{alias} = {' x '.join(atoms)}" for alias, atoms in topology.aliases.items())
        parts.append(text(MARGIN, bottom, joined, "quiet"))
    return page(title, max(widest + MARGIN, 60 + 9.2 * len(title)), bottom + 24, parts)


# The grids of ranks ----------------------------------------------------------------------------------------------------


class Cards(NamedTuple):
    """The arrangement of the cards in a panel: blocks of ``rows`` x ``columns`` cards, ``across`` blocks side by side.

    The two fastest axes larger than 1, ``fast``, span a block. There is one block per coordinate on the slower axes,
    ``slow``. The other attributes are in pixels.
    """

    slow: tuple[str, ...]
    fast: tuple[str, ...]
    rows: int
    columns: int
    across: int
    labels: float  # height of the labels above a block: its coordinate on slower axes, and column numbers
    block_size: tuple[float, float]
    panel_size: tuple[float, float]


def cards_of(topology: Topology) -> Cards:
    axes = tuple(axis for axis in topology.axes if topology.size(axis) > 1)
    slow, fast = axes[:-2], axes[-2:]
    rows, columns = topology.size(*fast[:-1]), topology.size(*fast[-1:])
    labels = 42 if slow else 24
    width, height = columns * (CARD + BETWEEN) + 34, rows * (CARD + BETWEEN) + labels
    count = topology.world_size // (rows * columns)
    across = min(count, 4, max(1, (WIDTH - 2 * MARGIN) // width))
    panel_size = max(across * width, 200), HEAD + -(-count // across) * height + FOOT
    return Cards(slow, fast, rows, columns, across, labels, (width, height), panel_size)


def panel(shown: Shown, topology: Topology, cards: Cards, left: float, top: float) -> Iterator[str]:
    """Iterate over the SVG elements of the panel of a parameter, whose upper left corner is at (``left``, ``top``)."""
    slow, fast, rows, columns, across, labels, (block_width, block_height), (_, height) = cards
    yield text(left, top + 18, shown.title, "name")
    yield text(left, top + 38, repr(shown.spec), "code")
    colours: dict[object, str] = {}
    for rank in range(topology.world_size):
        block, inside = divmod(rank, rows * columns)
        x0 = left + 26 + (block % across) * block_width
        y0 = top + HEAD + labels + (block // across) * block_height
        x, y = x0 + inside % columns * (CARD + BETWEEN), y0 + inside // columns * (CARD + BETWEEN)
        where = topology.coordinate(rank)
        if inside == 0 and slow:
            yield text(x0, y0 - 20, ", ".join(f"{axis} {where[axis]}" for axis in slow), "quiet")
        if inside < columns and fast:
            yield text(x + CARD / 2, y0 - 5, f"{fast[-1]} {where[fast[-1]]}", "quiet", "middle")
        if inside % columns == 0 and len(fast) > 1:
            label = text(0, 0, f"{fast[0]} {where[fast[0]]}", "quiet", "middle")
            yield f'<g transform="translate({x - 8:g} {y + CARD / 2:g}) rotate(-90)">{label}</g>'
        cells = held(shown, topology, rank)
        piece = (cells, *(where[axis] for axis in topology.pipe_axes))
        if cells:
            colours.setdefault(piece, COLOURS[len(colours) % len(COLOURS)])
        yield from card(rank, cells_of(shown, topology), cells, colours.get(piece, ""), x, y)
    holders, count = shown.spec.num_replicas(topology), len(colours)
    shards = "the full tensor" if count == 1 else f"{count} shards, each"
    yield text(left, top + height - FOOT + 12, f"{shards} on {holders} rank{'s' if holders > 1 else ''}")
    if shown.spec.partial:
        yield text(
            left, top + height - FOOT + 30, f"gradients are summed over {' x '.join(shown.spec.partial)}", "quiet"
        )


def card(rank: int, sizes: Sequence[int], cells: Cells, colour: str, x: float, y: float) -> Iterator[str]:
    """Iterate over the SVG elements of the card of a rank: the rank, and the full tensor with the rank's cells filled.

    Of a tensor of three dims, the cells along the first dim are drawn as a column.
    """
    yield box(x, y, CARD, CARD, "card", 6)
    yield text(x + CARD / 2, y + 14, str(rank), "quiet", "middle")
    rows, columns = (1, *sizes)[-2:] if len(sizes) < 3 else (sizes[0], 1)
    full = CARD - 26 if len(sizes) > 1 else BAR
    width, height = (CARD - 16) / columns, full / rows
    top = y + 20 + (CARD - 26 - full) / 2
    for row, column in product(range(rows), range(columns)):
        cell = (column,) if len(sizes) == 1 else (row, column) if len(sizes) == 2 else (row, 0, 0)
        yield box(
            x + 8 + column * width, top + row * height, width, height, "cell", fill=colour if cell in cells else ""
        )
