"""Code that the scripts of the pictures share: figures of a run, stored as JSON, and a frame for curves.

    python docs/pictures/drift.py           # measures, stores the figures, draws
    python docs/pictures/drift.py --draw    # draws from the stored figures

Every number in a picture comes from the figures. Tests compare each file with its script, and the figures with a run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from math import log10
from pathlib import Path
from typing import Any, NamedTuple

from meshstep.parallel.layout.picture import box, line, text

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
EXAMPLES = ROOT / "examples"

Figures = Any  # a JSON value
Point = tuple[float, float]


def example(name: str) -> Any:
    """Import a script of examples/."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def figures_of(name: str) -> Figures:
    """Return the stored figures of a picture."""
    return json.loads((HERE / "figures" / f"{name}.json").read_text())


def rounded(value: Any, digits: int = 6) -> Any:
    """Round all floats in nested lists and dicts to ``digits`` significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def keep(name: str, figures: Figures) -> None:
    text = json.dumps(rounded(figures), indent=1)
    (HERE / "figures" / f"{name}.json").write_text(text + "\n")


def main(name: str, measure: Callable[[], Figures], draw: Callable[[Figures], str]) -> None:
    """Run the command line of a picture's script."""
    parser = argparse.ArgumentParser(description=f"Draw {name}.svg from figures of a run.")
    parser.add_argument("--draw", action="store_true", help="draw only, from the stored figures")
    if not parser.parse_args().draw:
        keep(name, measure())
    (HERE / f"{name}.svg").write_text(draw(figures_of(name)), encoding="utf-8")


class Frame(NamedTuple):
    """A frame for curves: its position in pixels, and the values at its edges."""

    x: float
    y: float
    width: float
    height: float
    left: float
    right: float
    low: float
    high: float
    log: bool = False

    def place(self, x: float, y: float) -> Point:
        """Return the position of a value. Values outside the frame are on its edge."""
        low, high, value = (
            (log10(v) for v in (self.low, self.high, max(y, 1e-300))) if self.log else (self.low, self.high, y)
        )
        part = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.x + self.width * (x - self.left) / (self.right - self.left), self.y + self.height * (1 - part)

    def frame(self, title: str, ticks: Sequence[float], below: str = "step") -> Iterator[str]:
        """Draw the outline, the title and the ticks."""
        yield text(self.x, self.y - 10, title, "name")
        yield box(self.x, self.y, self.width, self.height, "line")
        for tick in ticks:
            _, y = self.place(self.left, tick)
            yield line([(self.x, y), (self.x + self.width, y)])
            yield text(self.x - 6, y + 4, f"{tick:g}", "quiet", "end")
        yield text(self.x, self.y + self.height + 18, f"{below} {self.left:g}", "quiet")
        yield text(self.x + self.width, self.y + self.height + 18, f"{self.right:g}", "quiet", "end")

    def curve(self, points: Sequence[Point], colour: str, width: float = 1.6) -> str:
        return line([self.place(*point) for point in points], colour=colour, width=width)
