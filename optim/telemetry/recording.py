"""Read the file of a `Recorder`: the recorded steps of a run, and the figures of every parameter."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite, sqrt
from os import PathLike
from pathlib import Path
from typing import Any

from .recorder import QUANTITIES, VERSION
from .tensor_digest import BUCKETS


@dataclass(frozen=True)
class Figures:
    """One quantity of one parameter in one step.

    ``hash`` is the hash of all bits; None: it is not known. ``sketch`` has `BUCKETS` signed sums of the elements (see
    `tensor_digest`); empty: it is not known.
    """

    norm: float
    hash: str | None
    sketch: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        """Return True if all elements were finite."""
        return isfinite(self.norm) and all(map(isfinite, self.sketch))


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step of a run.

    ``run`` is the last description of the run before the step's line in the file. ``following`` is the line of the next
    recorded step; None: there is none.
    """

    line: Mapping[str, Any]
    run: Mapping[str, Any]
    following: Mapping[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters, in the order of the file."""
        return tuple(self.line["parameters"])

    @cached_property
    def figures(self) -> dict[str, dict[str, Figures]]:
        """Return {parameter name: {"weight", "gradient" or "update": its figures}}."""
        return {name: _decode(entry) for name, entry in self.line["parameters"].items()}

    def layout(self, name: str) -> Mapping[str, Any]:
        """Return the recorded description of a parameter: shape, dtypes, param group and layout."""
        found: Mapping[str, Any] = self.run["parameters"][name]
        return found

    def options(self, name: str) -> Mapping[str, Any]:
        """Return the recorded options of the parameter's param group in this step; empty if the group is not recorded."""
        groups, group = self.line["groups"], self.layout(name)["group"]
        found: Mapping[str, Any] = groups[group] if group < len(groups) else {}
        return found

    def size(self, axis: str) -> int:
        """Return the size of a mesh axis; 1 if there is no such axis."""
        return int(self.run["axes"].get(axis, (1, ""))[0])

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes with several ranks."""
        return tuple(axis for axis in self.run["axes"] if self.size(axis) > 1)

    def role(self, axis: str) -> str:
        """Return the role of a mesh axis: "data", "model" or "pipe"."""
        return str(self.run["axes"][axis][1])

    def differing_axes(self, name: str, quantity: str) -> tuple[str, ...]:
        """Return the mesh axes along which replicas of a parameter differed; ``quantity`` is "weight" or "gradient"."""
        return tuple(self.line["replicas"].get(name, {}).get(quantity, ()))

    @property
    def global_norm(self) -> float:
        """Return the global gradient norm, from the norms of all parameters."""
        return sqrt(sum(figures["gradient"].norm ** 2 for figures in self.figures.values()))


def _decode(entry: Sequence[Any]) -> dict[str, Figures]:
    """Return the figures of each quantity from a parameter's list in the file."""
    *values, text = entry
    flat: list[float] = []
    if text is not None:
        raw = base64.b64decode(text)
        flat = array("f" if len(raw) == 4 * 3 * BUCKETS else "d", raw).tolist()
    return {
        quantity: Figures(float(values[at]), values[3 + at], tuple(flat[at * BUCKETS : (at + 1) * BUCKETS]))
        for at, quantity in enumerate(QUANTITIES)
    }


def read_recording(path: str | PathLike[str]) -> dict[int, RecordedStep]:
    """Return the recorded steps of a file by number.

    An incomplete last line is left out. Raise ValueError if another line is not from a `Recorder` of this version, or
    if there is no step.
    """
    steps: dict[int, RecordedStep] = {}
    run: dict[str, Any] | None = None
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if line.get("recording", VERSION) != VERSION:
                raise ValueError(
                    f"{path} is a recording of version {line['recording']}; use the release of meshstep that wrote it"
                )
            if "recording" in line:
                run = line
            elif run is None:
                raise KeyError("recording")
            else:
                steps[int(line["step"])] = RecordedStep(line, run)
                line["parameters"], line["groups"], line["replicas"]
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, RecursionError):
            if number < len(lines) or text.endswith("\n"):
                raise ValueError(f"line {number} of {path} is no record; give a file written by Recorder") from None
    numbers = sorted(steps)
    for number, after in pairwise(numbers):
        steps[number] = replace(steps[number], following=steps[after].line)
    if not steps:
        raise ValueError(f"{path} contains no recorded step; run the training for some steps first")
    return steps
