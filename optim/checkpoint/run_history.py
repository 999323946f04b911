"""Which checkpoint of a path a run has saved or loaded last, so that no run removes those of another."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

from ..parallel_optimizer import ParallelOptimizer

_last: WeakKeyDictionary[ParallelOptimizer, dict[Path, str]] = WeakKeyDictionary()


def last_known(optimizer: ParallelOptimizer, path: Path) -> str | None:
    """The name of the checkpoint under ``path`` that this optimizer was saved in or loaded from last."""
    return _last.get(optimizer, {}).get(path.resolve())


def remember(optimizer: ParallelOptimizer, checkpoint: Path) -> None:
    """The optimizer was saved in, or loaded from, this directory."""
    _last.setdefault(optimizer, {})[checkpoint.parent.resolve()] = checkpoint.name


def check_is_parallel(optimizer: object) -> None:
    """Raise TypeError for an optimizer of torch in place of the `ParallelOptimizer` that wraps it."""
    if not hasattr(optimizer, "registry"):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}; give the ParallelOptimizer that was made of it, which has the "
            "masters, the pieces and the counts of steps"
        )
