"""The choice of the kernel that rounds tensors to bfloat16 stochastically."""

from __future__ import annotations

from collections.abc import Sequence

from ...amp.stochastic_rounding import Drawn
from .choice import triton_on


def round_by_kernels(everything: Sequence[Drawn]) -> list[Drawn]:
    """Round tensors on devices on which Triton kernels are chosen (`use_kernels`), and return the other tensors."""
    here = [triton_on(drawn.pairs[0][0].device) is not None for drawn in everything]
    if any(here):
        from .triton_rounding import round_by_triton

        round_by_triton([drawn for drawn, is_here in zip(everything, here, strict=True) if is_here])
    return [drawn for drawn, is_here in zip(everything, here, strict=True) if not is_here]
