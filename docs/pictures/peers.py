"""Draw the time of a clipped step of meshstep and of other libraries, measured by tests/benchmarks/peers.py."""

from __future__ import annotations

import subprocess
import sys

from common import ROOT, Figures, figures_of, main
from meshstep.parallel.layout.picture import COLOURS, box, page, text

OURS, OTHERS = COLOURS[2], COLOURS[7]
LABELS, WIDTH, BAR, STEP, TOP = 250, 210, 16, 22, 84
MOST = 5.0  # the longest bar, as a multiple of bare AdamW
WORDS = {"masters": "master weights", "plain chain": "torch, by hand", "CPUAdam, alone": "CPUAdam, no norm"}


def measure() -> Figures:
    """Measure, for minutes, on a quiet machine with the packages of the extra ``interop``."""
    script = ROOT / "tests" / "benchmarks" / "peers.py"
    for ranks in (1, 2):
        subprocess.run([sys.executable, str(script), "--ranks", str(ranks), "--keep"], check=True)
    return figures_of("peers")


def label(name: str) -> str:
    """Return the text for a name in the figures."""
    for word, standard in WORDS.items():
        name = name.replace(word, standard)
    return name


def draw(figures: Figures) -> str:
    parts, y = [], float(TOP)
    of_ranks = list(figures.values())
    for column, title in enumerate(figures):
        parts.append(text(LABELS + (WIDTH + 70) * column, 66, title, "name"))
    for precision, found in of_ranks[0].items():
        parts.append(text(36, y + 13, label(precision), "name"))
        y += STEP
        for name in found:
            parts.append(text(LABELS - 12, y + 12, label(name), "name" if name == "meshstep" else "", "end"))
            for column, by_precision in enumerate(of_ranks):
                ratio = by_precision[precision].get(name)
                if ratio is not None:
                    x, width = LABELS + (WIDTH + 70) * column, WIDTH * min(ratio, MOST) / MOST
                    parts.append(box(x, y, width, BAR, "", 3, OURS if name.startswith("meshstep") else OTHERS))
                    parts.append(text(x + width + 8, y + 13, f"{ratio:.2f}"))
            y += STEP
        y += 10
    notes = (
        "30M parameters per rank, one thread, fused AdamW of torch, float32 master weights; lower is better.",
        "New gradients at new addresses before every step. In the README's benchmark gradients are reused: lower ratios.",
    )
    parts += [text(36, y + 14 + 20 * index, note, "quiet") for index, note in enumerate(notes)]
    title = "Norm, clipping and update, as a multiple of bare float32 AdamW"
    return page(title, LABELS + 2 * (WIDTH + 70) + 20, y + 54, parts)


if __name__ == "__main__":
    main("peers", measure, draw)
