"""`GradStats`: the printed form, and comparisons by the norm."""

from __future__ import annotations

import pytest
import torch
from meshstep.optim import GradStats


def stats(norm: float, coef: float = 1.0, skipped: float = 0.0, scale: float | None = None) -> GradStats:
    total_norm, clip_coef, found_inf = (torch.tensor(number) for number in (norm, coef, skipped))
    loss_scale = None if scale is None else torch.tensor(scale)
    return GradStats(total_norm, clip_coef, found_inf, torch.tensor([norm]), loss_scale)


@pytest.mark.parametrize(
    ("measured", "printed"),
    [
        (stats(0.91349), "norm 0.913"),
        (stats(0.91349, 0.54821), "norm 0.913, clipped x0.548"),
        (stats(float("inf"), skipped=1.0, scale=65536.0), "norm inf, skipped, loss scale 65536"),
        (stats(2.0, 0.5, scale=1024.0), "norm 2, clipped x0.5, loss scale 1024"),
    ],
)
def test_grad_stats_prints_norm_clip_coefficient_and_loss_scale(measured: GradStats, printed: str) -> None:
    assert f"{measured}" == str(measured) == printed


def test_grad_stats_are_compared_by_their_norm() -> None:
    one, two = stats(1.0), stats(2.0)
    assert [one < two, one <= two, one > two, one >= two] == [True, True, False, False]
    assert [one < stats(1.0), one <= stats(1.0), one > stats(1.0), one >= stats(1.0)] == [False, True, False, True]
    assert [one < 1.0, one <= 1.0, one > 1.0, one >= 1.0] == [False, True, False, True]
