"""Checks for capturing a step in a CUDA graph: reasons against a capture are errors, raised before anything is changed.

A replay runs the kernels of the captured step again, with the same Python numbers and the same memory. Python code of the
step (counting, checking, choosing) runs only once, during the capture. So it must have finished in earlier steps, and each
value that a step reads must be a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..amp.capture import is_captured
from ..parallel.mesh.registry import ProcessGroupRegistry
from .step.combined_optimizer import kind_of, parts_of
from .step.update import steps_on_device


def check_captured(call: str, not_captured: Callable[[], Sequence[str]]) -> bool:
    """Return True if the call is captured in a CUDA graph.

    Args:
        call: The name of the method.
        not_captured: Returns the reasons against a capture. Called only during a capture.
    Raises:
        RuntimeError: There is a reason. The text lists all of them.
    """
    if not is_captured():
        return False
    if reasons := not_captured():
        raise RuntimeError(f"{call} can't be captured in a CUDA graph here: {'; '.join(reasons)}")
    return True


def registry_not_captured(registry: ProcessGroupRegistry, device: torch.device) -> str | None:
    """Return why collectives over gradients on ``device`` can't be captured; None: they can be."""
    if registry.topology.world_size == 1 or registry.device.type == device.type:
        return None
    return (
        f"the gradients are on {device} and collectives on {registry.device}: join the ranks with the backend 'nccl', "
        "one GPU each"
    )


def update_not_captured(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[str]:
    """Yield the reasons why the update of a torch optimizer can't be captured."""
    kind = kind_of(optimizer)
    if not steps_on_device(optimizer):
        yield f"{kind} reads whether to skip on the host: give it fused=True, if it has that"
    for part in parts_of(optimizer):
        if reason := getattr(part, "not_captured", None):
            yield f"{type(part).__name__} {reason}"
    for index, group in enumerate(optimizer.param_groups):
        lr = group.get("lr")
        if group["params"] and not (isinstance(lr, Tensor) and lr.device == device):
            yield (
                f"the lr of param group {index} is {lr}, which replays would keep whatever a schedule does: give "
                f"lr=torch.tensor({float(lr or 0)}, device={str(device)!r}), which schedules write to"
            )
            return
