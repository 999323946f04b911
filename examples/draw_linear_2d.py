"""Draw the shards of a 2-D linear layer on each rank, and the ranks over which their contributions to the norm are summed.

    python examples/draw_linear_2d.py docs/pictures/linear_2d.svg

The picture is computed: `Linear2D` declares the specs, `shard` gives the elements of a rank, and the `ReductionPlan` gives
groups and weights. No process is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from meshstep.optim import NormBucket, ParameterEntry, ReductionPlan
from meshstep.parallel import BiasLayout, Linear2D, P, ProcessGroupRegistry, Topology, local_shape, shard, spec_of

GRID = Topology(row=2, col=2)
IN, OUT = 4, 4


# Shards and groups of ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The part of a registry that `shard` needs, for one rank, without processes."""

    topology: Topology
    rank: int

    @property
    def coordinate(self) -> dict[str, int]:
        return self.topology.coordinate(self.rank)

    def size(self, *axes: str) -> int:
        return self.topology.size(*axes)


class Held(NamedTuple):
    """The shard of one rank: indices of its elements in the full tensor, and the shard's weight in the squared norm.

    The weight is 1 / replication factor, or 0 if the rank has no shard.
    """

    elements: tuple[int, ...]
    weight: Fraction


class Parameter(NamedTuple):
    """A parameter on the grid.

    Attributes:
        title, spec, shape: Caption, layout and full shape.
        held: The shard of each rank.
        axes: The mesh axes over which the squared norm is summed.
        groups: The groups of ranks along these axes.
    """

    title: str
    spec: P
    shape: tuple[int, ...]
    held: tuple[Held, ...]
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def shards(self) -> list[tuple[int, ...]]:
        """Return the distinct shards, ordered by their first element."""
        return sorted({held.elements for held in self.held if held.elements})


def linear_2d_parameters(topology: Topology = GRID) -> Iterator[Parameter]:
    """Iterate over the weight, and the bias in each of its layouts."""
    with ProcessGroupRegistry(Topology(row=1, col=1)) as one:  # one rank suffices, because specs do not depend on sizes
        for layout in get_args(BiasLayout):
            layer = Linear2D(IN, OUT, one, bias=layout)
            if layout == get_args(BiasLayout)[0]:
                yield parameter("weight", spec_of(layer.weight), (IN, OUT), topology)
            assert layer.bias is not None
            yield parameter(f'bias="{layout}"', spec_of(layer.bias), (OUT,), topology)


def parameter(title: str, spec: P, shape: tuple[int, ...], topology: Topology) -> Parameter:
    """Compute one parameter's shards, their weights in the squared norm, and the process groups that sum it."""
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    held = []
    for rank in range(topology.world_size):
        place: Any = Place(topology, rank)
        elements = tuple(shard(full, spec, place).flatten().tolist())
        entries = [ParameterEntry(title, spec, local_shape(shape, spec, topology))] if elements else []
        weights = ReductionPlan.of(entries, topology, rank).replica_weights
        held.append(Held(elements, Fraction(weights[0]) if weights else Fraction(0)))
    axes = NormBucket.of(spec, topology).axes(topology)
    groups = tuple(sorted({tuple(topology.peers(rank, *axes)) for rank in range(topology.world_size)}))
    return Parameter(title, spec, shape, tuple(held), axes, groups)


# The drawing ----------------------------------------------------------------------------------------------------------

MARGIN, PANEL, GAP = 36, 212, 26  # margin of the picture, width of a panel, and gap between panels
CARD, BETWEEN = (88, 96), 22  # size of a rank's card, and gap between cards
HEAD, BODY = 136, 256  # top and height of the grid
COLOURS = ("#2f81f7", "#e8912d", "#2da44e", "#bf4b8a")
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 } .name { font-size: 15px; font-weight: 600 }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px }
  .quiet { fill: #59636e; font-size: 12px } .page { fill: #ffffff; stroke: #d1d9e0 }
  .card { fill: #f6f8fa; stroke: #d1d9e0 } .cell { fill: #ffffff; stroke: #afb8c1 }
  .group { fill: none; stroke: #59636e; stroke-width: 1.6; stroke-dasharray: 5 4 }
"""
DARK = """
    text { fill: #e6edf3 } .quiet { fill: #9198a1 } .page { fill: #0d1117; stroke: #3d444d }
    .card { fill: #1b2129; stroke: #3d444d } .cell { fill: #0d1117; stroke: #59636e } .group { stroke: #9198a1 }
"""
TIMES = "\N{MULTIPLICATION SIGN}"
LEGEND = (
    "Filled: elements that a rank holds. Equal shards have the same colour. Dashed: ranks whose contributions are summed.",
    f"{TIMES} 1/2: weight of a rank's contribution if one packed sum goes over all ranks; two ranks hold the same shard.",
)


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 0, fill: str = "") -> str:
    style = f' style="fill: {fill}"' if fill else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"{style}/>'


def draw_tensor(param: Parameter, held: Held, x: float, y: float) -> Iterator[str]:
    """Draw the full tensor around (x, y), with the rank's elements in the colour of the shard."""
    rows, cols = (1, *param.shape)[-2:]
    width, height = (44 / cols, 44 / rows) if rows > 1 else (68 / cols, 16)
    left, top = x - width * cols / 2, y - height * rows / 2
    number = [i for i, elements in enumerate(param.shards) if elements == held.elements]
    for element in range(rows * cols):
        row, col = divmod(element, cols)
        fill = COLOURS[number[0]] if element in held.elements else ""
        yield box(left + col * width, top + row * height, width, height, "cell", fill=fill)


def draw_rank(param: Parameter, rank: int, x: float, y: float) -> Iterator[str]:
    held = param.held[rank]
    yield box(x, y, *CARD, "card", 8)
    yield text(x + CARD[0] / 2, y + 18, f"rank {rank}", "quiet")
    yield from draw_tensor(param, held, x + CARD[0] / 2, y + 49)
    count, kind = (f"{TIMES} {held.weight}", "") if held.elements else ("no shard", "quiet")
    yield text(x + CARD[0] / 2, y + 88, count, kind)


def draw_panel(param: Parameter, left: float, topology: Topology) -> Iterator[str]:
    """Draw title, grid of ranks, outlines of the groups, and text about the sum."""
    middle = left + PANEL / 2
    yield text(middle, HEAD - 58, param.title, "name")
    yield text(middle, HEAD - 37, str(param.spec), "code")
    corners = {}
    for rank in range(topology.world_size):
        row, col = topology.coordinate_of(rank, "row"), topology.coordinate_of(rank, "col")
        x, y = corners[rank] = left + 7 + col * (CARD[0] + BETWEEN), HEAD + 7 + row * (CARD[1] + BETWEEN)
        yield from draw_rank(param, rank, x, y)
        if row == 0:
            yield text(x + CARD[0] / 2, HEAD - 9, f"col {col}", "quiet")
        if col == 0:
            across = f'<g transform="translate({left - 9:g} {y + CARD[1] / 2:g}) rotate(-90)">'
            yield f"{across}{text(0, 0, f'row {row}', 'quiet')}</g>"
    for group in param.groups:
        xs, ys = zip(*(corners[rank] for rank in group), strict=True)
        width, height = max(xs) - min(xs) + CARD[0], max(ys) - min(ys) + CARD[1]
        yield box(min(xs) - 6, min(ys) - 6, width + 12, height + 12, "group", 12)
    replication = {held.weight.denominator for held in param.held if held.elements}
    holders = " or ".join(map(str, sorted(replication)))
    yield text(middle, HEAD + BODY, "sum over " + " x ".join(param.axes))
    ranks = " and ".join(f"{{{', '.join(map(str, group))}}}" for group in param.groups)
    yield text(middle, HEAD + BODY + 20, ranks, "code")
    plural = "" if holders == "1" else "s"
    yield text(middle, HEAD + BODY + 40, f"{len(param.shards)} shards, each on {holders} rank{plural}", "quiet")


def draw(topology: Topology = GRID, *, style: str | None = None) -> str:
    """Return the picture as SVG. ``style`` replaces the style sheet that follows the reader's light or dark mode."""
    params = list(linear_2d_parameters(topology))
    width, height = 2 * MARGIN + len(params) * PANEL + (len(params) - 1) * GAP, HEAD + BODY + 112
    style = style or f"{STYLE}  @media (prefers-color-scheme: dark) {{{DARK}  }}\n"
    sizes = " x ".join(str(size) for size in topology.sizes)
    title = f"A 2-D linear layer on a {sizes} grid: the shards of each rank, and the groups of each sum"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{title}</title>",
        f"<style>{style}</style>",
        box(0.5, 0.5, width - 1, height - 1, "page", 12),
        text(MARGIN, 40, title, "title", "start"),
    ]
    for index, param in enumerate(params):
        parts += draw_panel(param, MARGIN + index * (PANEL + GAP), topology)
    parts += [text(MARGIN, height - 42 + 20 * line, words, "quiet", "start") for line, words in enumerate(LEGEND)]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, help="the SVG file to write")
    parser.parse_args().output.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
