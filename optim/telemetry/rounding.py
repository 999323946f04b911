"""Distances of recorded tensors, and the tolerances by dtype and step within which a distance counts as rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import dist, inf

from .recording import Figures, RecordedStep

TOLERANCES: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2, "float8": 0.2}
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8": 2.0**-2}
# A gradient's distance is relative to the gradient's norm, or to this fraction of the global norm if that is larger.
FLOOR = 0.01


@dataclass(frozen=True)
class Tolerances:
    """Relative distances of gradients that still count as rounding.

        Tolerances({"float32": 1e-3})

    In each run, a parameter has the dtype of its forward pass, which follows from the precision mode and the
    parameter's dtype. The coarser of the two dtypes determines the tolerance of the parameter, which in step s is
    ``relative * (1 + growth * (s - 1))``, but at most 0.25 (or ``relative``, if that is larger).

    Args:
        relative: Tolerance in the first step by dtype: "float64", "float32", "float16", "bfloat16" or "float8". Dtypes
            that are not given keep the default: 1e-9, 1e-4, 2e-2, 5e-2 and 0.2.
        growth: Growth per step, as a fraction of the tolerance in the first step. Default: 0.1.

    Raises:
        ValueError: A dtype is unknown, a tolerance is not a finite number > 0, or ``growth`` is not finite and >= 0.
    """

    relative: Mapping[str, float] = field(default_factory=dict)
    growth: float = 0.1

    def __post_init__(self) -> None:
        for dtype, value in self.relative.items():
            if dtype not in TOLERANCES or not 0 < value < inf:
                raise ValueError(
                    f"a tolerance of {value} for {dtype!r}: give a finite number > 0 for one of {', '.join(TOLERANCES)}"
                )
        if not 0 <= self.growth < inf:
            raise ValueError(f"growth={self.growth}: give a finite number >= 0")

    def at(self, dtype: str, step: int) -> float:
        """Return the tolerance for a dtype in a step."""
        first = {**TOLERANCES, **self.relative}[dtype]
        return max(first, min(first * (1 + self.growth * (step - 1)), 0.25))


def coarsest(*dtypes: str) -> str:
    """Return the dtype with the largest tolerance."""
    return max(dtypes, key=lambda dtype: (TOLERANCES[dtype], dtype))


def compute_dtype(step: RecordedStep, name: str) -> str:
    """Return the coarsest dtype in which the forward pass uses a parameter, as far as the recording shows it."""
    precision, dtype = str(step.run["precision"]), str(step.layout(name)["dtype"])
    by_mode = next(
        (found for key, found in (("fp8", "float8"), ("bf16", "bfloat16"), ("fp16", "float16")) if key in precision),
        dtype,
    )
    return coarsest(dtype if dtype in TOLERANCES else "float8", by_mode if by_mode in TOLERANCES else "float32")


# Distances ------------------------------------------------------------------------------------------------------------


def distance(a: Figures, b: Figures) -> float:
    """Return the estimated distance of two tensors: 0 if hashes are equal or both are non-finite, inf if only one is."""
    if a.hash is not None and a.hash == b.hash:
        return 0.0
    if not (a.is_finite and b.is_finite):
        return 0.0 if a.is_finite == b.is_finite else inf
    gap = abs(a.norm - b.norm)
    return max(gap, dist(a.sketch, b.sketch)) if a.sketch and b.sketch else gap


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=False))


def multiple(a: Figures, b: Figures, tolerance: float) -> float | None:
    """Return r if ``b`` is r times ``a``, up to 3 * ``tolerance`` (at least 1e-4) times the norm of ``b``; else None.

    Return None also if a tensor is zero or not finite. If a sketch is not known, r is the ratio of the norms.
    """
    if not (a.is_finite and b.is_finite and a.norm and b.norm):
        return None
    if not a.sketch or not b.sketch:
        return b.norm / a.norm
    squared = dot(a.sketch, a.sketch)
    ratio = dot(a.sketch, b.sketch) / squared if squared else 0.0
    rest = dist(b.sketch, [ratio * x for x in a.sketch])
    # The rounding errors of r times `a` are relative to the norm of r `a`, about the norm of `b`. So are both limits.
    limit = max(3 * tolerance, 1e-4) * b.norm
    return ratio if rest <= limit and abs(abs(ratio) * a.norm - b.norm) <= limit else None
