"""Gradients that a pipeline schedule divides after its backward, where that is wrong.

With ``scale_grads=True`` every stage of `torch.distributed.pipelining` divides the gradients of its parameters by the
number of micro-batches when the schedule is through: right where each is of this call alone, and is divided once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class DivisionRecord(Protocol):
    """What a window is told, and of which micro-batch."""

    micro_batches: int
    divided_again: bool


@contextmanager
def watching_stages(window: DivisionRecord, params: Sequence[Tensor]) -> Iterator[None]:
    """Around a schedule's step: note in the window where stages divide what was divided already.

    Args:
        params: Whose gradients add up.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        yield
        return
    kind: Any = module._PipelineStageBase  # of all stages; nothing public tells when they divide
    divide = kind.scale_grads
    before = params if window.micro_batches > 1 else ()
    divided = {id(param) for param in before if param.grad is not None}

    def scale_grads(stage: Any, factor: int) -> None:
        divide(stage, factor)
        own = {id(param) for param in stage.submod.parameters() if param.grad is not None}
        window.divided_again |= factor != 1 and bool(divided & own)
        divided.update(own)

    kind.scale_grads = scale_grads
    try:
        yield
    finally:
        kind.scale_grads = divide
