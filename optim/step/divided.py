"""Gradients that a pipeline schedule divides after its backward, where that is wrong.

With ``scale_grads=True`` every stage of `torch.distributed.pipelining` divides the gradients of its parameters by the
number of micro-batches when the schedule is through: right where each is of this call alone, and is divided once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def watching_stages(params: Sequence[Tensor], is_first: bool, wrong: Callable[[], object]) -> Iterator[None]:
    """Call ``wrong`` where stages divide what is not theirs to divide; around a schedule's step.

    Args:
        params: Whose gradients add up.
        is_first: No earlier micro-batch of the window has left gradients.
    """
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        yield
        return
    kind: Any = module._PipelineStageBase  # of all stages; nothing public tells when they divide
    divide = kind.scale_grads
    divided = set() if is_first else {id(param) for param in params if param.grad is not None}

    def scale_grads(stage: Any, factor: int) -> None:
        divide(stage, factor)
        own = {id(param) for param in stage.submod.parameters() if param.grad is not None}
        if factor != 1 and divided & own:
            wrong()
        divided.update(own)

    kind.scale_grads = scale_grads
    try:
        yield
    finally:
        kind.scale_grads = divide
