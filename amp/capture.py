"""Whether a CUDA graph is being made of what this thread does: its replays run the kernels again, and nothing of Python."""

from __future__ import annotations

import torch


def is_captured() -> bool:
    """Whether the current stream is being captured. Host reads: none."""
    # Without a driver the second question is an error, and nothing is captured before the first stream is there.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
