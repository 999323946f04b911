"""Whether a CUDA graph is being made of what this thread does: its replays run the kernels again, and nothing of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_captured() -> bool:
    """Whether the current stream is being captured. Host reads: none."""
    # Without a driver the second question is an error, and nothing is captured before the first stream is there.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def keeps_state_in_place(owner: object) -> Iterator[None]:
    """Around code of somebody else, whose object has a state.

    Raises:
        RuntimeError: A CUDA graph is made, and it gave attributes other values, which replays don't.
    """
    before = dict(vars(owner)) if is_captured() else None
    yield
    changed = [] if before is None else sorted(n for n, value in vars(owner).items() if before.get(n) is not value)
    if changed:
        raise RuntimeError(
            f"{type(owner).__name__} gives {', '.join(changed)} another value in a step that is captured in a CUDA graph, "
            "which replays don't: keep it in tensors that are changed in place"
        )
