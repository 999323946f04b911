"""Matrices [short, long] in float64 with different distributions of singular values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def _random(short: int, long: int) -> Tensor:
    return torch.randn(short, long, generator=_seeded(), dtype=torch.float64)


def _falling(to: float, short: int, long: int) -> Tensor:
    """Return a matrix whose singular values fall geometrically from 1 to ``10**to``."""
    generator = _seeded()
    left, right = (
        torch.linalg.qr(torch.randn(size, short, generator=generator, dtype=torch.float64))[0] for size in (short, long)
    )
    falling: Tensor = (left * torch.logspace(0, to, short, dtype=torch.float64)) @ right.mT
    return falling


def _of_rank(rank: int, noise: float, short: int, long: int) -> Tensor:
    generator = _seeded()
    sides = [torch.randn(size, rank, generator=generator, dtype=torch.float64) for size in (short, long)]
    return sides[0] @ sides[1].mT + noise * torch.randn(short, long, generator=generator, dtype=torch.float64)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


SPECTRA: dict[str, Callable[[int, int], Tensor]] = {
    "random": _random,
    "down to 1e-2": partial(_falling, -2.0),
    "down to 1e-8": partial(_falling, -8.0),
    "rank 4": partial(_of_rank, 4, 0.0),
    "rank 1 and noise": partial(_of_rank, 1, 1e-3),
}
