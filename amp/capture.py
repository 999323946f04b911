"""Detection of CUDA graph capture. A replay of the graph repeats the kernels and runs no Python code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_captured() -> bool:
    """Return True if the current CUDA stream is being captured into a CUDA graph. No host synchronization."""
    # is_current_stream_capturing() raises without a driver; no capture exists before CUDA is initialized.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def keeps_state_in_place(owner: object) -> Iterator[None]:
    """Raise in a CUDA graph capture if the ``with`` block assigns a new object to an attribute of ``owner``.

    Use it around calls of user-defined code: a replay of the graph would not repeat the assignment.
    """
    before = dict(vars(owner)) if is_captured() else None
    yield
    changed = [] if before is None else sorted(n for n, value in vars(owner).items() if before.get(n) is not value)
    if changed:
        raise RuntimeError(
            f"{type(owner).__name__} assigns a new object to {', '.join(changed)} in a step that is captured in a CUDA "
            "graph; a replay would not repeat the assignment. Keep this state in tensors that are changed in place"
        )
