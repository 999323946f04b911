"""The error that ends training."""

from __future__ import annotations

from ..clip.decide import Clipping
from ..gradients.kinds import nonfinite_names


def stopped(reason: str, clipping: Clipping) -> FloatingPointError:
    """The error, in the place of an update, with the names of the parameters whose gradients are not finite. Collectives,
    host reads: some."""
    names = nonfinite_names(clipping.params, clipping.plan.entries, clipping.registry)
    return FloatingPointError(
        f"{reason}; gradients that are not finite now: {', '.join(names) or 'none (the norm itself overflowed)'}. "
        "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
    )
