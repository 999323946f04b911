"""A clipped step of meshstep's and of its neighbours': bars, from what tests/benchmarks/peers.py says on 1 and 2 ranks."""

from __future__ import annotations

import subprocess
import sys

from common import ROOT, Figures, figures_of, main
from meshstep.parallel.layout.picture import COLOURS, box, page, text

OURS, OTHERS = COLOURS[2], COLOURS[7]
LABELS, WIDTH, BAR, STEP, TOP = 250, 210, 16, 22, 84
MOST = 5.0  # times the bare optimizer's: where a bar ends


def measure() -> Figures:
    """Of a quiet machine; takes minutes, and the packages of the extra ``interop``."""
    script = ROOT / "tests" / "benchmarks" / "peers.py"
    for ranks in (1, 2):
        subprocess.run([sys.executable, str(script), "--ranks", str(ranks), "--keep"], check=True)
    return figures_of("peers")


def draw(figures: Figures) -> str:
    parts, y = [], float(TOP)
    of_ranks = list(figures.values())
    for column, title in enumerate(figures):
        parts.append(text(LABELS + (WIDTH + 70) * column, 66, title, "name"))
    for precision, found in of_ranks[0].items():
        parts.append(text(36, y + 13, precision, "name"))
        y += STEP
        for name in found:
            parts.append(text(LABELS - 12, y + 12, name, "name" if name == "meshstep" else "", "end"))
            for column, by_precision in enumerate(of_ranks):
                ratio = by_precision[precision].get(name)
                if ratio is not None:
                    x, width = LABELS + (WIDTH + 70) * column, WIDTH * min(ratio, MOST) / MOST
                    parts.append(box(x, y, width, BAR, "", 3, OURS if name.startswith("meshstep") else OTHERS))
                    parts.append(text(x + width + 8, y + 13, f"{ratio:.2f}"))
            y += STEP
        y += 10
    parts.append(
        text(
            36,
            y + 14,
            "30M parameters a rank, torch's fused AdamW, one thread; masters are float32; lower is better",
            "quiet",
        )
    )
    title = "Norm, clip and step: multiples of bare fused float32 AdamW"
    return page(title, LABELS + 2 * (WIDTH + 70) + 20, y + 34, parts)


if __name__ == "__main__":
    main("peers", measure, draw)
