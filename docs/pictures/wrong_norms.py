"""The gradient norm of one linear layer in the ways that are in use: bars, from what examples/compare_norms.py says."""

from __future__ import annotations

from common import Figures, example, main
from meshstep.parallel import ProcessGroupRegistry
from meshstep.parallel.layout.picture import COLOURS, box, line, page, text
from meshstep.testing import run_ranks

RIGHT, WRONG = COLOURS[2], COLOURS[1]
LABELS = 330  # where the bars begin
SCALE, BAR, STEP, TOP = 380, 22, 32, 92


def rows() -> Figures:
    """On each of 4 ranks: [[method, norm], ...], the dense layer's first."""
    script = example("compare_norms")
    options = script.read_options(4, ["--topology", "row=2,col=2"])
    with ProcessGroupRegistry(options.topology) as registry:
        truth = ("dense layer, float64", script.dense_norm(script.layer_input()))
        return [list(row) for row in (truth, *script.measure(*script.prepare(options, registry)))]


def measure() -> Figures:
    return run_ranks(rows, 4)[0]


def shown(method: str) -> str:
    """In the words of who does not know the script."""
    return (
        method.replace("each rank its own gradients:", "torch's clip_grad_norm_,")
        .replace("one boolean, bias marked", "one flag, bias marked")
        .partition(": ")[0]
    )


def draw(figures: Figures) -> str:
    (_, truth), *bars = figures
    parts = [
        text(
            36,
            62,
            "A linear layer on a 2 x 2 grid of processes, its bias split over one axis and copied over the other",
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
    parts.append(text(x, bottom + 14, f"the dense layer's: {truth:.1f}", "quiet", "middle"))
    return page("The norm of one gradient, as it is measured", 860, bottom + 34, parts)


if __name__ == "__main__":
    main("wrong_norms", measure, draw)
