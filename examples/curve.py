"""What the examples keep of a run's reports: the last one beside the progress bar, all of them for a file."""

from __future__ import annotations

from pathlib import Path

from meshstep.optim import Report
from tqdm import tqdm


class Curve:
    """Shows each report of a `Monitor` on the bar, and keeps it."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar
        self.reports: list[Report] = []

    def __call__(self, now: Report) -> None:
        self.bar.set_postfix_str(str(now), refresh=False)
        self.reports.append(now)

    def write(self, path: Path) -> None:
        """Step, loss and gradient norm of every report, as CSV."""
        rows = (f"{now.step},{now.loss!r},{now.grad_norm!r}" for now in self.reports)
        path.write_text("\n".join(["step,loss,norm", *rows, ""]))
