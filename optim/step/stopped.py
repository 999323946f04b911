"""The error that ends training."""

from __future__ import annotations

from ..clip.decide import Clipping
from ..gradients.kinds import nonfinite_names
from .skips import PARTED


def stopped(reason: str, clipping: Clipping) -> FloatingPointError | RuntimeError:
    """The error, in the place of an update, with the names of the parameters whose gradients are not finite, or whose
    copies differ. Collectives, host reads: some."""
    if reason == PARTED and clipping.ballot is not None and clipping.ballot.watch is not None:
        return clipping.ballot.watch.error()
    names = nonfinite_names(clipping.params, clipping.plan.entries, clipping.registry)
    return FloatingPointError(
        f"{reason}; gradients that are not finite now: {', '.join(names) or 'none (the norm itself overflowed)'}. "
        "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
    )
