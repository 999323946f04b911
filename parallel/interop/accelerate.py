"""accelerate and a Transformers `Trainer` around an optimizer: they clip gradients themselves.

Their norm is one of gradients that may not be averaged or summed yet, or of a rank's own pieces, and their clip comes
before the optimizer's own. They are seen where they call `step`, by the frames that call it.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakSet

from .local import loaded_class

_TAKEN: WeakSet[object] = WeakSet()
TAKE_OVER = "call meshstep.optim.take_over_clipping({}, optimizer)"


def taken_over(optimizer: object) -> None:
    """From here on what accelerate clips by is ``optimizer`` itself."""
    _TAKEN.add(optimizer)


def innermost(optimizer: Any) -> Any:
    """The optimizer within what accelerate has made of it."""
    kind: Any = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    while kind is not None and isinstance(optimizer, kind):
        optimizer = optimizer.optimizer
    return optimizer


def wrong_around() -> str | None:
    """What is wrong with the `Trainer`, or accelerate, that is calling: it clips by a norm of its own. None: nothing.

    Host reads, collectives: none.
    """
    trainer_kind = loaded_class("transformers.trainer", "Trainer")
    optimizer_kind = loaded_class("accelerate.optimizer", "AcceleratedOptimizer")
    frame = sys._getframe() if optimizer_kind is not None else None
    accelerated: Any = None
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        if trainer_kind is not None and isinstance(caller, trainer_kind):
            return _wrong_with_trainer(caller)
        if optimizer_kind is not None and isinstance(caller, optimizer_kind):
            accelerated = caller
        frame = frame.f_back
    if accelerated is None or innermost(accelerated) in _TAKEN:
        return None
    return (
        "accelerate steps this optimizer, and its clip_grad_norm_ would clip gradients before the optimizer does, by a "
        "norm of its own: "
        + TAKE_OVER.format("accelerator")
        + " after accelerator.prepare, whether you clip by it or not"
    )


def _wrong_with_trainer(trainer: Any) -> str | None:
    optimizer, norm = innermost(trainer.optimizer), trainer.args.max_grad_norm
    if norm and optimizer not in _TAKEN:
        return (
            f"the Trainer has clipped the gradients by max_grad_norm={norm}, by a norm of its own, before the optimizer's "
            "own step: " + TAKE_OVER.format("trainer") + ", or write TrainingArguments(max_grad_norm=0) and give "
            "ParallelOptimizer max_norm="
        )
    return None
