"""A step in a CUDA graph: what its replays would not do is refused by name, before anything is changed.

A replay runs the kernels of the captured step again, with the numbers that Python gave them, on the memory that they had.
What Python does, such as to count, to look or to choose, it does once, when the graph is made. So all of it must have been
settled in the steps before, and what a step reads must be a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..amp.capture import is_captured
from .norm.measure import Fingerprints
from .step.combined_optimizer import kind_of, parts_of
from .step.data_parallel import TorchGradSync
from .step.update import steps_on_device
from .step.window import Window

if TYPE_CHECKING:
    from .parallel_optimizer import ParallelOptimizer


def check_captured(optimizer: ParallelOptimizer[Any], call: str) -> bool:
    """Return whether a CUDA graph is made of a call of the optimizer.

    Raises:
        RuntimeError: It can't be captured. The text has all reasons.
    """
    if not is_captured():
        return False
    if reasons := [*_reasons(optimizer)]:
        raise RuntimeError(f"{call} can't be captured in a CUDA graph here: {'; '.join(reasons)}")
    return True


def _reasons(optimizer: ParallelOptimizer[Any]) -> Iterator[str]:
    registry, window, device = optimizer.registry, optimizer._window, optimizer._device
    if not optimizer._completion.looked:
        yield "no step was made before, and the first one looks at what came, on the host: make some steps without a graph"
    if registry.topology.world_size > 1 and registry.device.type != device.type:
        yield (
            f"the gradients are on {device} and collectives on {registry.device}: join the ranks with the backend 'nccl', "
            "one GPU each"
        )
    if isinstance(optimizer._switch, TorchGradSync):
        module = type(optimizer._switch.modules[0]).__name__
        yield f"data_parallel={module} averages gradients in Python: leave it out, and the optimizer averages them"
    if hasattr(optimizer, "found_inf"):
        yield "a GradScaler calls it: leave it out, and take a precision with a loss scale of its own, 'fp16' say"
    if optimizer.on_nonfinite == "raise":
        yield "on_nonfinite='raise' reads the norm: leave it out, and call poll() between replays"
    if optimizer._clipping.vote is not None and optimizer._clipping.vote.commit is not None:
        yield "Measure(commit=...) is asked in Python: leave it out, and decide before a replay"
    if isinstance(optimizer._clipping.measure.check_replicas, Fingerprints):
        yield "Measure(check_replicas=Fingerprints(...)) counts steps in Python: leave it out"
    elif optimizer._clipping.measure.check_replicas is True:
        yield "Measure(check_replicas=True) reads what it compared: leave it out, copies are compared in the first step"
    elif optimizer._clipping.checks:
        yield "copies have not been compared yet, in a step that was not skipped: make some steps more without a graph"
    yield from filter(None, (link.not_captured() for link in optimizer._states.links))
    yield from filter(None, (observer.not_captured() for observer in optimizer.observers))
    yield from _of_window(window, device)
    yield from _of_optimizer(optimizer.optimizer, device)


def _of_window(window: Window, device: torch.device) -> Iterator[str]:
    if not window.is_full:
        yield (
            f"{window.micro_batches} of accumulation_steps={window.steps} micro-batches have come, which replays would not "
            "count: capture a whole window, or leave accumulation_steps out and call step only in the graph of the last one"
        )
    if isinstance(window.weight, Tensor) and window.weight.device != device:
        yield f"the weight of the window is on {window.weight.device}: give tensors on {device}"


def _of_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[str]:
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
