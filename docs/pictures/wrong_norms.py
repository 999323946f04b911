"""Draw the gradient norm of one linear layer as bars, measured in several ways by examples/compare_norms.py."""

from __future__ import annotations

from common import Figures, example, main
from meshstep.parallel import ProcessGroupRegistry
from meshstep.parallel.layout.picture import COLOURS, box, line, page, text
from meshstep.testing import run_ranks

RIGHT, WRONG = COLOURS[2], COLOURS[1]
LABELS = 330  # where the bars begin
SCALE, BAR, STEP, TOP = 380, 22, 32, 92


def rows() -> Figures:
    """Return [[method, norm], ...] on each of 4 ranks; the first row is the dense layer."""
    script = example("compare_norms")
    options = script.read_options(4, ["--topology", "row=2,col=2"])
    with ProcessGroupRegistry(options.topology) as registry:
        truth = ("dense layer, float64", script.dense_norm(script.layer_input()))
        return [list(row) for row in (truth, *script.measure(*script.prepare(options, registry)))]


def measure() -> Figures:
    return run_ranks(rows, 4)[0]


def shown(method: str) -> str:
    """Return the label of a bar."""
    return method.partition(": ")[0]


def draw(figures: Figures) -> str:
    (_, truth), *bars = figures
    parts = [
        text(
            36,
            62,
            "A linear layer on a 2 x 2 mesh; its bias is sharded over one axis and replicated over the other",
            "quiet",
        )
    ]
    bottom = TOP + STEP * len(bars)
    for index, (method, norm) in enumerate(bars):
        y = TOP + STEP * index
        off = round(norm / truth - 1, 6) + 0.0
        right = abs(off) < 1e-4
        parts.append(text(LABELS - 12, y + 16, shown(method), "name" if right else "", "end"))
        parts.append(box(LABELS, y, SCALE * norm / truth, BAR, "", 3, RIGHT if right else WRONG))
        parts.append(text(LABELS + 10, y + 16, f"{norm:.1f}", "inside"))
        parts.append(text(LABELS + SCALE * 1.05 + 22, y + 16, "exact" if right else f"{off:+.1%}", "name"))
    x = LABELS + SCALE
    parts.append(line([(x, TOP - 8), (x, bottom)], "mark"))
    parts.append(text(x, bottom + 14, f"dense layer: {truth:.1f}", "quiet", "middle"))
    return page("The norm of one gradient, measured in several ways", 860, bottom + 34, parts)


if __name__ == "__main__":
    main("wrong_norms", measure, draw)
