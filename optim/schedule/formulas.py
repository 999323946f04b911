"""Learning rates as closed formulas of t, the number of steps taken so far; rate(t) is that of the next step.

With base rate b of a param group, W warm-up steps and a run of T steps::

    rate(t) = warmup(t) * (b * decay(t) + floor * (1 - decay(t))),    warmup(t) = min(1, (t + 1) / (W + 1))

    decay(t)   constant     1
               multi_step   gamma ** |{m in milestones: m <= t}|
               polynomial   (1 - x) ** power
               cosine       (1 + cos(pi x)) / 2           with x(t) = min(1, max(0, t - W) / max(1, T - W))

The first step has rate b / (W + 1) and not 0, which would waste it; the rate is b at t = W and never above it. A warm-up
that is as long as the run or longer is still a warm-up, and after T the rate stays what it is there.

Plain functions of numbers: no optimizer, no state. Each is a factor in 0..1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def warmup(step: int, warmup_steps: int) -> float:
    """min(1, (t + 1) / (W + 1))."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def constant(step: int) -> float:
    """1."""
    return 1.0


def multi_step(step: int, milestones: Iterable[int], gamma: float) -> float:
    """gamma to the power of the milestones that were reached; one that comes twice counts twice."""
    return float(gamma ** sum(milestone <= step for milestone in milestones))


def polynomial(step: int, total_steps: int, warmup_steps: int = 0, power: float = 1.0) -> float:
    """(1 - x) ** power; linear with power 1."""
    return float((1 - progress(step, total_steps, warmup_steps)) ** power)


def cosine(step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """(1 + cos(pi x)) / 2: half a period.

    Reference: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, without restarts.
    """
    return (1 + math.cos(math.pi * progress(step, total_steps, warmup_steps))) / 2


def progress(step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """x: 0 until the end of the warm-up, 1 from the end of the run on."""
    return min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))
