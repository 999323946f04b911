"""The error that ends training."""

from __future__ import annotations

from ..clip.clipper import Clipping
from ..gradients.in_place import nonfinite_names
from .skips import DISAGREED, PARTED, SkipMonitor
from .step_agreement import StepAgreement


def stopped(
    reason: str, clipping: Clipping, agreement: StepAgreement | None, skips: SkipMonitor
) -> FloatingPointError | RuntimeError:
    """The error, in the place of an update, with the names of the parameters whose gradients are not finite, or whose
    copies differ, or with what ranks disagree about. Collectives, host reads: some."""
    if reason == DISAGREED and agreement is not None:
        return agreement.error(skips.facts)
    if reason == PARTED and clipping.ballot is not None and clipping.ballot.watch is not None:
        return clipping.ballot.watch.error()
    names = nonfinite_names(clipping.params, clipping.plan.entries, clipping.registry)
    return FloatingPointError(
        f"{reason}; gradients that are not finite now: {', '.join(names) or 'none (the norm itself overflowed)'}. "
        "Nothing was stepped: look for a too large learning rate, a division by zero or a too large loss scale"
    )
