"""The error that weights were written through ``.data`` beside master weights or other copies."""

from __future__ import annotations

from collections.abc import Sequence


def check_not_overwritten(names: Sequence[str | None], has_fingerprints: bool) -> None:
    """Raise RuntimeError, on every rank alike, if a rank found weights that the next step would undo.

    Args:
        names: By global rank, the parameter that `Chain.find_overwritten` returned there.
        has_fingerprints: `Fingerprints` compare replicas. A difference on one rank alone is left to them: it may be a
            flipped bit, of which they name tensor and rank.
    """
    if has_fingerprints and len(names) > 1 and sum(name is not None for name in names) == 1:
        return
    for rank, name in enumerate(names):
        if name is not None:
            raise RuntimeError(
                f"{name} was changed since the last step on rank {rank}, and the next step would put the old weights back, "
                "of a master weight or another copy: call optimizer.reload_from_model() each time after writing weights. "
                "Writes through .data change no version counter: the second and 16th step look for them, other steps "
                "undo them silently"
            )
