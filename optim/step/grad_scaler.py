"""What a `torch.amp.GradScaler` that calls `step` has left to be undone."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_of_scaler(optimizer: torch.optim.Optimizer, sees_gradients: bool, mode: str) -> Tensor | None:
    """What the scaler multiplied the loss by, and has not undone; it sets ``optimizer.grad_scale``.

    Args:
        sees_gradients: Those that are stepped with are those that backward left.
        mode: The precision mode's name.
    Raises:
        RuntimeError: It is torch's own, or can't see the gradients.
    """
    if not hasattr(optimizer, "_overflow_is_agreed"):
        raise RuntimeError(
            "torch's GradScaler decides on each rank alone whether to step: take meshstep.amp.GradScaler(registry), or "
            "leave it out and give precision='fp16', whose loss scale is the optimizer's own"
        )
    if not sees_gradients:
        raise RuntimeError(
            f"a GradScaler can't see the gradients that are stepped with in precision={mode!r} with these states: leave it "
            "out and take a precision with a loss scale of its own, 'fp16' or 'fp16_naive'"
        )
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return scale
