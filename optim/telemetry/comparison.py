"""`compare_runs`, which finds the first step and parameter in which two recorded runs differ, and guesses the cause."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ...parallel.mesh.text import printable, some
from .recording import RecordedStep, read_recording
from .rounding import TOLERANCES, Tolerances
from .step_difference import first_difference
from .step_pair import Accepted, Difference, StepPair


@dataclass(frozen=True)
class RunComparison:
    """Result of `compare_runs`; prints as a report.

        print(compare_runs("a.jsonl", "b.jsonl"))

    Args:
        verdict: "equal" (all hashes are equal), "rounding only" or "different".
        steps: Numbers of the steps that were compared.
        difference: The first difference beyond rounding. None: there is none.
        largest: Largest relative distance that was accepted as rounding, by quantity. A distance of
            gradients is relative to the gradient's norm, or to 1% of the global norm if that is larger.
        notes: Facts that may explain a difference, such as other seeds.
    """

    verdict: str
    steps: tuple[int, ...]
    difference: Difference | None
    largest: Mapping[str, float]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON."""
        found = (
            None if self.difference is None else {**vars(self.difference), "parameters": [*self.difference.parameters]}
        )
        return {
            "verdict": self.verdict,
            "steps": [*self.steps],
            "difference": found,
            "largest": {**self.largest},
            "notes": [*self.notes],
        }

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {len(self.steps)} recorded steps compared, up to step {self.steps[-1]}"]
        if self.difference is not None:
            found = self.difference
            lines = [
                f"first difference: step {found.step}, {found.quantity}"
                + ("" if found.parameter is None else f" of {printable(found.parameter)}"),
                f"probable cause: {found.cause}" + ("" if found.axis is None else f" (axis {found.axis})"),
                f"  {found.text}",
            ]
            if len(found.parameters) > 1:
                lines.append(f"  differing parameters: {some(found.parameters, 8)}")
        if self.largest:
            shown = ", ".join(f"{name} {value:.1e}" for name, value in self.largest.items())
            lines.append(f"largest relative distance {'before it' if self.difference else 'found'}: {shown}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def compare_runs(a: str | PathLike[str], b: str | PathLike[str], tolerances: Tolerances | None = None) -> RunComparison:
    """Compare two recordings of `Recorder`, which may come from different layouts, step by step.

        found = compare_runs("a.jsonl", "b.jsonl")
        if found.difference is not None:
            print(found.difference.parameter, found.difference.cause)

    Args:
        a, b: The files. Texts in the result call the runs A and B.
        tolerances: The distances that count as rounding. None (default): ``Tolerances()``.

    Raises:
        OSError: A file can't be read.
        ValueError: A file is no recording, or the runs have no recorded step in common.
    """
    runs = read_recording(a), read_recording(b)
    common = sorted(runs[0].keys() & runs[1].keys())
    if not common:
        raise ValueError(f"{a} and {b} have no recorded step in common; record both runs with the same every=")
    accepted, compared = Accepted(tolerances or Tolerances()), list[int]()
    notes = tuple(_notes(runs[0][common[0]], runs[1][common[0]]))
    for step in common:
        compared.append(step)
        found = first_difference(StepPair(step, runs[0][step], runs[1][step], accepted))
        if found is not None:
            return RunComparison("different", tuple(compared), found, accepted.largest, notes)
        accepted.last_step = step
    return RunComparison("equal" if accepted.equal else "rounding only", tuple(compared), None, accepted.largest, notes)


def _notes(a: RecordedStep, b: RecordedStep) -> Iterator[str]:
    shown = [", ".join(f"{axis}={run.size(axis)}" for axis in run.axes) or "one rank" for run in (a, b)]
    if shown[0] != shown[1]:
        yield f"layouts: A {shown[0]}; B {shown[1]}"
    for key in ("precision", "optimizer", "max_norm", "seed"):
        if a.run[key] != b.run[key]:
            yield f"{key}: A {printable(str(a.run[key]))}; B {printable(str(b.run[key]))}"


# Command ``python -m meshstep.optim compare A.jsonl B.jsonl`` ---------------------------------------------------------


def add_compare_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``compare`` to the commands of a parser; ``options.run_command(options)`` then runs it."""
    compare = commands.add_parser(
        "compare",
        help="find the first difference of two recorded runs",
        description="Print the first step and parameter in which two recorded runs differ beyond rounding, and the "
        "probable cause. The layouts may differ. The exit code is 0 for equal runs and for rounding only, 1 for "
        "a difference, and 2 for an error.",
        epilog="example: python -m meshstep.optim compare one_rank.jsonl eight_ranks.jsonl",
        allow_abbrev=False,
    )
    compare.add_argument("run_a", metavar="RUN_A", type=Path, help="a file written by Recorder")
    compare.add_argument("run_b", metavar="RUN_B", type=Path, help="the file of the other run")
    defaults = ", ".join(f"{dtype}={value:g}" for dtype, value in TOLERANCES.items())
    compare.add_argument(
        "--tolerance",
        metavar="DTYPE=X",
        action="append",
        default=[],
        type=_tolerance,
        help=f"largest relative distance of gradients in the first step that counts as rounding; default: {defaults}",
    )
    compare.add_argument("--growth", type=float, default=0.1, help="growth of the tolerance per step; default: 0.1")
    compare.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    compare.set_defaults(run_command=_print_comparison)


def _tolerance(text: str) -> tuple[str, float]:
    dtype, _, value = text.partition("=")
    try:
        return dtype, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give DTYPE=NUMBER, such as float32=1e-3") from None


def _print_comparison(options: argparse.Namespace) -> int:
    found = compare_runs(options.run_a, options.run_b, Tolerances(dict(options.tolerance), options.growth))
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return int(found.difference is not None)
