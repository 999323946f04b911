"""Stochastic rounding with the random numbers of a GPU: unbiased, and equal for equal seeds."""

from __future__ import annotations

import torch
from graph_runs import Run, Setting, by_steps
from meshstep.amp import Bf16, stochastic_round_
from precision_modes import differences


def rounded(source: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(source.device).manual_seed(seed)
    return stochastic_round_(torch.empty_like(source, dtype=torch.bfloat16), source, generator)


def test_stochastic_rounding_on_device_is_unbiased(device: torch.device) -> None:
    count = 2**22 if device.type == "cuda" else 2**18
    for part in (0.1, 0.5, 0.9):
        value = 1.0 + part * 2**-7  # between the neighbours 1 and 1 + 2^-7
        found = rounded(torch.full((count,), value, device=device), seed=3)
        assert found.unique().tolist() == [1.0, 1.0 + 2**-7]
        share = float((found > 1).double().mean())
        assert abs(share - part) < 5 * (part * (1 - part) / count) ** 0.5


def test_stochastic_rounding_is_equal_for_equal_seeds_only(device: torch.device) -> None:
    source = torch.randn(10_001, device=device)
    assert torch.equal(rounded(source, 1), rounded(source, 1))
    assert not torch.equal(rounded(source, 1), rounded(source, 2))


def test_stochastic_rounding_keeps_exact_bfloat16_values(device: torch.device) -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, torch.nan], device=device)
    found = rounded(exact, 5).float()
    assert torch.equal(found.nan_to_num(nan=7.0), exact.nan_to_num(nan=7.0))


def test_two_runs_with_stochastic_rounding_are_bitwise_identical(device: torch.device) -> None:
    setting = Setting(Bf16(stochastic_rounding=True), {"max_norm": 0.5})
    assert differences(*(by_steps(Run(setting, device)) for _ in range(2))) == []
