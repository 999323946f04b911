"""Precision modes by their names."""

from __future__ import annotations

from typing import Literal

from .apex import ApexFp16
from .fp8.mode import Fp8
from .modes import Bf16, Fp32, NaiveFp16, TorchFp16
from .precision import Precision

Mode = Literal["fp32", "fp16", "bf16", "fp16_naive", "fp16_apex", "fp8"]
MODES: tuple[type[Precision], ...] = (Fp32, TorchFp16, Bf16, NaiveFp16, ApexFp16, Fp8)


def precision_of(precision: str | Precision) -> Precision:
    """The mode of this name with its defaults, or the object itself; for names that come from a command line or a file.

    Raises:
        ValueError: There is no mode of this name.
    """
    if isinstance(precision, Precision):
        return precision
    for mode in MODES:
        if mode.name == precision:
            return mode()
    names = ", ".join(repr(mode.name) for mode in MODES)
    raise ValueError(f"precision={precision!r} is no mode; give one of {names}, or an object such as Bf16()")
